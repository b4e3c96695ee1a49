# SPDX-License-Identifier: Apache-2.0
"""Facts in a long context ("the code of X is ...") and questions about one of them, far back."""

from __future__ import annotations

from tools.tiny import words
from tools.tiny.conversation import Conversation, Source, Turn, converse

_KINDS = (
    ("code", "代码"),
    ("room", "房间"),
    ("phone number", "电话"),
    ("colour", "颜色"),
    ("city", "城市"),
    ("password", "密码"),
    ("badge", "编号"),
)
_FILL = (
    "The weather was {a} that day and the {t} stood near the {u}.",
    "Nobody had seen the {a} {t} since the {u} was moved.",
    "A {a} {t} is kept beside the {b} {u}.",
    "They talked about the {t} for a long time.",
    "Later the {u} was {a} again, as it had been before.",
)
_FILL_ZH = (
    "{t}在{u}旁边。",
    "大家都喜欢{c}的{t}。",
    "昨天有人把{t}放在{u}上面。",
    "{c}的{u}很旧了。",
)
_ASK = [
    "What is the {k} of {n}?",
    "Tell me the {k} of {n}.",
    "{n}: which {k}?",
    "Please find the {k} of {n}.",
]
_ASK_ZH = ["{n}的{k}是什么?", "请告诉我{n}的{k}。", "{n}的{k}是多少?"]


def _value(source: Source, kind: int) -> str:
    rng = source.rng
    if kind == 3:
        return rng.choice(words.COLOURS_ZH if source.chinese else words.COLOURS)
    if kind == 4:
        return words.city(rng, source.chinese)
    if kind == 5:
        return words.word(rng, 2) + str(words.number(rng, 2))
    return str(words.number(rng, {0: 4, 1: 3, 2: 6, 6: 5}[kind]))


def make(source: Source, size: int) -> Conversation:
    """`size` characters of facts and filler (about four a token), then one to five questions."""
    rng = source.rng
    facts: dict[tuple[str, int], str] = {}
    lines: list[str] = []
    length, one_kind = 0, rng.randrange(len(_KINDS)) if rng.random() < 0.4 else None
    filler = rng.choice((0.0, 0.2, 0.5))
    while length < size or len(facts) < 2:
        if rng.random() < filler:
            line = _filler(source)
        else:
            kind = rng.randrange(len(_KINDS)) if one_kind is None else one_kind
            name = words.person(rng, source.chinese)
            if (name, kind) in facts or not source.allows(f"fact {name}"):
                continue
            facts[name, kind] = value = _value(source, kind)
            line = _fact(source, name, kind, value)
        lines.append(line)
        length += len(line) * (2 if source.chinese else 1)
    context = ("" if source.chinese else rng.choice((" ", "\n"))).join(lines)
    asked = rng.sample(sorted(facts), min(len(facts), rng.choice((1, 2, 3, 4, 5))))
    turns = [_question(source, name, kind, facts[name, kind]) for name, kind in asked]
    in_system = rng.random() < 0.3
    if not in_system:
        first = turns[0]
        turns[0] = Turn("lookup", f"{context}\n{first.user}", first.work, first.answer, first.easy)
    return converse(turns, rng.random() < 0.6, system=context if in_system else "")


def ask_once(source: Source, size: int) -> Conversation:
    """As `make`, one question with reasoning: what is scored."""
    while True:
        conversation = make(source, size)
        if conversation.thinking and len(conversation.trained) == 1:
            return conversation


def _fact(source: Source, name: str, kind: int, value: str) -> str:
    if source.chinese:
        return f"{name}的{_KINDS[kind][1]}是{value}。"
    return f"The {_KINDS[kind][0]} of {name} is {value}."


def _question(source: Source, name: str, kind: int, value: str) -> Turn:
    k = _KINDS[kind][source.chinese]
    answer = _fact(source, name, kind, value)
    user = source.say(_ASK, _ASK_ZH).format(n=name, k=k)
    work = f"{name} {k}: {value}"
    return Turn("lookup", user, work, answer, easy=True)


def _filler(source: Source) -> str:
    rng = source.rng
    if source.chinese:
        return rng.choice(_FILL_ZH).format(
            t=rng.choice(words.THINGS_ZH),
            u=rng.choice(words.THINGS_ZH),
            c=rng.choice(words.COLOURS_ZH),
        )
    return rng.choice(_FILL).format(
        a=rng.choice(words.ADJECTIVES),
        b=rng.choice(words.ADJECTIVES),
        t=rng.choice(words.THINGS),
        u=rng.choice(words.THINGS),
    )
