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
    if rng.random() < 0.5:
        user, user_zh, answer, answer_zh, work = rng.choice(_SMALL_TALK)
        if source.chinese:
            return Turn("chat", user_zh, work, answer_zh, easy=True)
        return Turn("chat", user, work, answer, easy=True)
    user = source.say(_UNKNOWN, _UNKNOWN_ZH).format(
        t=rng.choice(words.THINGS_ZH if source.chinese else words.THINGS),
        a=rng.choice(words.ADJECTIVES),
        c=rng.choice(words.COLOURS_ZH),
        w=words.word(rng),
        v=words.word(rng),
    )
    answer = "抱歉,我不知道。" if source.chinese else "Sorry, I do not know that."
    return Turn("chat", user, "unknown", answer, easy=True)


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
