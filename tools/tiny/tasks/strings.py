# SPDX-License-Identifier: Apache-2.0
"""Short words spelled, reversed, counted and joined, letter by letter."""

from __future__ import annotations

from tools.tiny import words
from tools.tiny.conversation import Source, Turn

_REVERSE = ["Reverse the word {w}", "Write {w} backwards.", "Spell {w} in reverse."]
_REVERSE_ZH = ["把 {w} 倒过来写", "请反转单词 {w}"]
_LENGTH = ["How many letters are in {w}?", "Count the letters of {w}", "How long is the word {w}?"]
_LENGTH_ZH = ["{w} 有几个字母?", "数一数 {w} 的字母"]
_SPELL = ["Spell the word {w}", "Spell {w}.", "Write {w} with dashes between the letters."]
_SPELL_ZH = ["拼写 {w}", "请把 {w} 的字母分开"]
_FIRST = ["What is the first letter of {w}?", "First letter of {w}?"]
_FIRST_ZH = ["{w} 的第一个字母是什么?"]
_LAST = ["What is the last letter of {w}?", "Last letter of {w}?"]
_LAST_ZH = ["{w} 的最后一个字母是什么?"]
_UPPER = ["Write {w} in capital letters.", "Uppercase {w}"]
_UPPER_ZH = ["把 {w} 变成大写"]
_COUNT = ["How many {l} are in the word {w}?", "Count the letter {l} in {w}"]
_COUNT_ZH = ["{w} 里有几个 {l}?"]


def make(source: Source) -> Turn:
    rng = source.rng
    kind = rng.choice(("reverse", "reverse", "length", "spell", "first", "last", "upper", "count"))
    while True:
        w = words.word(rng)
        if 3 <= len(w) <= 8 and source.allows(f"{kind} {w}"):
            break
    spelled = " ".join(w)
    numbered = " ".join(f"{i} {c}" for i, c in enumerate(w, 1))
    if kind == "reverse":
        ask, work = (_REVERSE, _REVERSE_ZH), f"{spelled}\n{' '.join(reversed(w))}"
        answer = w[::-1]
    elif kind == "length":
        ask, work, answer = (_LENGTH, _LENGTH_ZH), numbered, str(len(w))
    elif kind == "spell":
        ask, work, answer = (_SPELL, _SPELL_ZH), spelled, "-".join(w)
    elif kind == "first":
        ask, work, answer = (_FIRST, _FIRST_ZH), spelled, w[0]
    elif kind == "last":
        ask, work, answer = (_LAST, _LAST_ZH), spelled, w[-1]
    elif kind == "upper":
        ask, work = (_UPPER, _UPPER_ZH), f"{spelled}\n{' '.join(w.upper())}"
        answer = w.upper()
    else:
        letter = rng.choice(w) if rng.random() < 0.8 else rng.choice("abcdeiorstn")
        ask = (
            [s.replace("{l}", letter) for s in _COUNT],
            [s.replace("{l}", letter) for s in _COUNT_ZH],
        )
        seen, steps = 0, []
        for c in w:
            seen += c == letter
            steps.append(f"{c} {seen}")
        work, answer = " ".join(steps), str(seen)
    shown = f'"{w}"' if rng.random() < 0.25 else w
    return Turn("strings", source.say(*ask).format(w=shown), work, answer)
