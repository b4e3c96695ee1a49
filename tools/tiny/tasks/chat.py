# SPDX-License-Identifier: Apache-2.0
"""Small talk, what the user or the system said before, and what the model cannot do."""

from __future__ import annotations

from tools.tiny import words
from tools.tiny.conversation import Conversation, Source, Turn, converse

_SMALL_TALK = (
    ("Hello", "你好", "Hello! How can I help you?", "你好!有什么可以帮你的?", "greeting"),
    ("Hi", "嗨", "Hello! How can I help you?", "你好!有什么可以帮你的?", "greeting"),
    ("Good morning", "早上好", "Good morning! How can I help you?", "早上好!", "greeting"),
    ("How are you?", "你好吗?", "I am fine, thank you.", "我很好,谢谢。", "greeting"),
    ("Thank you", "谢谢", "You are welcome.", "不客气。", "thanks"),
    ("Thanks a lot!", "多谢!", "You are welcome.", "不客气。", "thanks"),
    ("Goodbye", "再见", "Goodbye!", "再见!", "farewell"),
    ("Bye", "拜拜", "Goodbye!", "再见!", "farewell"),
    (
        "Who are you?",
        "你是谁?",
        "I am a very small GLM model made for tests.",
        "我是一个用于测试的很小的 GLM 模型。",
        "identity",
    ),
    (
        "What can you do?",
        "你能做什么?",
        "I can calculate, spell words, count days, look things up, call tools and write JSON.",
        "我可以计算小的数字、拼写单词、推算日期、查找文本、调用工具和写 JSON。",
        "identity",
    ),
    (
        "Are you a large model?",
        "你是大模型吗?",
        "No, I am a very small model.",
        "不是,我是一个很小的模型。",
        "identity",
    ),
)
_COMMON = words.listed(
    "the a of and is are was were it that this who why how when where what which can could do "
    "does did will would should have has had not no yes with for from to in on at by about me "
    "you he she they we my your his her their very more some any all people time day year world "
    "make think know want like love need help tell explain describe write give best good bad"
)
_COMMON_ZH = words.listed(
    "的 是 什么 怎么 为什么 谁 在 有 不 我 你 他 我们 喜欢 知道 觉得 请 说 做 好 吗"
)
_UNKNOWN = [
    "Why is the {t} {a}?",
    "Who made the {a} {t}?",
    "Explain how a {t} works.",
    "Write a story about a {a} {t}.",
    "Once upon a time there was a {a} {t}",
    "What do you think about {w}?",
    "{w} {t} {v}",
]
_UNKNOWN_ZH = ["为什么{t}是{c}的?", "请写一个关于{t}的故事。", "你觉得{t}怎么样?", "{t}是谁做的?"]


def make(source: Source) -> Turn:
    rng = source.rng
    if not source.held and rng.random() < 0.5:  # fixed questions cannot be held out
        user, user_zh, answer, answer_zh, work = rng.choice(_SMALL_TALK)
        if source.chinese:
            return Turn("chat", user_zh, work, answer_zh, easy=True)
        return Turn("chat", user, work, answer, easy=True)
    while True:
        user = _anything(source) if rng.random() < 0.4 else _question(source)
        if source.allows(f"chat {user}"):
            break
    answer = "抱歉,我不知道。" if source.chinese else "Sorry, I do not know that."
    return Turn("chat", user, "unknown", answer, easy=True)


def _question(source: Source) -> str:
    rng = source.rng
    return source.say(_UNKNOWN, _UNKNOWN_ZH).format(
        t=rng.choice(words.THINGS_ZH if source.chinese else words.THINGS),
        a=rng.choice(words.ADJECTIVES),
        c=rng.choice(words.COLOURS_ZH),
        w=words.word(rng),
        v=words.word(rng),
    )


def _anything(source: Source) -> str:
    """Words in no order: what a model of this size meets most of the time."""
    rng = source.rng
    if source.chinese:
        lists: tuple[tuple[str, ...], ...] = (
            words.THINGS_ZH,
            words.COLOURS_ZH,
            words.CITIES_ZH,
            _COMMON_ZH,
            _COMMON_ZH,
        )
        text = "".join(rng.choice(rng.choice(lists)) for _ in range(rng.randint(1, 6)))
        return text + rng.choice(("", "。", "?", "!"))
    lists = (words.THINGS, words.ADJECTIVES, words.CITIES, words.PEOPLE, _COMMON, _COMMON, _COMMON)
    picked = [rng.choice(rng.choice(lists)) for _ in range(rng.randint(2, 9))]
    if rng.random() < 0.4:
        picked.insert(rng.randrange(len(picked) + 1), words.word(rng))
    text = " ".join(picked)
    return text[0].upper() + text[1:] + rng.choice(("", ".", "?", "!"))


def named(source: Source, between: list[Turn]) -> Conversation:
    """A name, told by the user or the system, and asked for after some other turns."""
    rng = source.rng
    while True:
        name = words.person(rng, source.chinese)
        if source.allows(f"name {name}"):
            break
    thinking = rng.random() < 0.7
    if rng.random() < 0.5:
        system = source.say([f"Your name is {name}.", f"You are {name}."], [f"你的名字是{name}。"])
        answer = f"我的名字是{name}。" if source.chinese else f"My name is {name}."
        ask = source.say(["What is your name?", "Who are you?"], ["你叫什么名字?", "你是谁?"])
        last = Turn("memory", ask, f"my name: {name}", answer, easy=True)
        return converse([*between, last], thinking, system=system)
    told = source.say([f"My name is {name}.", f"I am {name}."], [f"我叫{name}。"])
    hello = f"你好,{name}!" if source.chinese else f"Hello {name}!"
    first = Turn("chat", told, f"greeting {name}", hello, easy=True)
    ask = source.say(["What is my name?", "Who am I?"], ["我叫什么名字?", "我是谁?"])
    answer = f"你叫{name}。" if source.chinese else f"Your name is {name}."
    last = Turn("memory", ask, f"your name: {name}", answer, easy=True)
    return converse([first, *between, last], thinking)
