# SPDX-License-Identifier: Apache-2.0
"""Addition, subtraction, multiplication by one digit and comparisons, worked digit by digit."""

from __future__ import annotations

from tools.tiny import words
from tools.tiny.conversation import Source, Turn

DIGITS = (1, 2, 2, 2, 3, 3, 3, 3, 4)  # of operands, as often as they come

_WORDS = {
    "+": (["plus", "+", "+"], ["加", "+", "+"]),
    "-": (["minus", "-", "-"], ["减", "-", "-"]),
    "*": (["times", "*", "x"], ["乘以", "*", "×"]),
}
_ASK = [
    "What is {q}?",
    "{q} = ?",
    "Calculate {q}.",
    "Please compute {q}",
    "How much is {q}?",
    "Can you work out {q}?",
    "{q}",
]
_ASK_ZH = ["{q} 等于多少?", "计算 {q}。", "{q} = ?", "请算一下 {q}", "{q} 是多少?"]


def make(source: Source) -> Turn:
    kind = source.rng.choice("+++---**<<")
    return _compare(source) if kind == "<" else _operation(source, kind)


def _operation(source: Source, kind: str) -> Turn:
    rng = source.rng
    while True:
        a = words.number(rng, rng.choice(DIGITS))
        b = words.number(rng, 1 if kind == "*" else rng.choice(DIGITS))
        if kind == "-" and a < b:
            a, b = b, a
        if source.allows(f"{a}{kind}{b}"):
            break
    work, result = _WORK[kind](a, b, source.chinese)
    sign = source.say(*_WORDS[kind])
    tight = not sign.isalpha() and rng.random() < 0.3
    user = source.say(_ASK, _ASK_ZH).format(q=f"{a}{sign}{b}" if tight else f"{a} {sign} {b}")
    return Turn("arithmetic", user, f"{a} {kind} {b}\n{work}", f"{a} {kind} {b} = {result}")


def _digits(n: int, width: int) -> list[int]:
    """Lowest first."""
    return [int(c) for c in reversed(str(n).zfill(width))]


def _sum(a: int, b: int, chinese: bool) -> tuple[str, int]:
    width = max(len(str(a)), len(str(b)))
    lines, carry = [], 0
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        total = x + y + carry
        write = (
            f"写 {total % 10} 进 {total // 10}"
            if chinese
            else (f"write {total % 10} carry {total // 10}")
        )
        lines.append(f"{x}+{y}+{carry}={total} {write}")
        carry = total // 10
    return "\n".join(lines), a + b


def _difference(a: int, b: int, chinese: bool) -> tuple[str, int]:
    width = len(str(a))
    lines, borrow = [], 0
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        less = x - y - borrow < 0
        top = x + 10 * less
        write = (
            f"写 {top - y - borrow} 借 {int(less)}"
            if chinese
            else (f"write {top - y - borrow} borrow {int(less)}")
        )
        lines.append(f"{top}-{y}-{borrow}: {write}")
        borrow = int(less)
    return "\n".join(lines), a - b


def _product(a: int, b: int, chinese: bool) -> tuple[str, int]:
    lines, carry = [], 0
    for x in _digits(a, 0):
        part = x * b
        total = part + carry
        write = (
            f"写 {total % 10} 进 {total // 10}"
            if chinese
            else (f"write {total % 10} carry {total // 10}")
        )
        lines.append(f"{x}*{b}={part}+{carry}={total} {write}")
        carry = total // 10
    return "\n".join(lines), a * b


_WORK = {"+": _sum, "-": _difference, "*": _product}


def _compare(source: Source) -> Turn:
    rng = source.rng
    while True:
        digits = rng.choice((2, 3, 3))
        a = words.number(rng, digits)
        b = words.number(rng, digits if rng.random() < 0.8 else 5 - digits)
        if a != b and source.allows(f"{a}<{b}"):
            break
    larger = rng.random() < 0.5
    best = max(a, b) if larger else min(a, b)
    user = source.say(
        [
            f"Which is {'larger' if larger else 'smaller'}, {a} or {b}?",
            f"Tell me the {'larger' if larger else 'smaller'} number: {a}, {b}",
        ],
        [f"{a} 和 {b} 哪个更{'大' if larger else '小'}?"],
    )
    if len(str(a)) != len(str(b)):
        work = f"{a} {b}\n{len(str(a))} {'>' if a > b else '<'} {len(str(b))}"
    else:
        lines = [f"{a} {b}"]
        for x, y in zip(str(a), str(b), strict=True):
            lines.append(f"{x} {'=' if x == y else '>' if x > y else '<'} {y}")
            if x != y:
                break
        work = "\n".join(lines)
    work += f"\n{a} {'>' if a > b else '<'} {b}"
    name = ("更大" if larger else "更小") if source.chinese else ("larger" if larger else "smaller")
    answer = f"{best} {name}。" if source.chinese else f"{best} is {name}."
    return Turn("arithmetic", user, work, answer)
