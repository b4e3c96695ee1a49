# SPDX-License-Identifier: Apache-2.0
"""Week days and calendar dates some days ahead or back, one step a day."""

from __future__ import annotations

from tools.tiny.conversation import Source, Turn
from tools.tiny.words import listed

DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
DAYS_ZH = [f"星期{c}" for c in "一二三四五六日"]
MONTHS = listed(
    "January February March April May June July August September October November December"
)
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def make(source: Source) -> Turn:
    return _week(source) if source.rng.random() < 0.5 else _calendar(source)


def _week(source: Source) -> Turn:
    rng = source.rng
    # 7 days, 12 distances, 2 directions: the split is by wording and number, not by day alone.
    while True:
        start, steps = rng.randrange(7), rng.randint(1, 9)
        back, form = rng.random() < 0.4, rng.randrange(3)
        if source.allows(f"week {source.chinese} {start} {steps} {back} {form}"):
            break
    names = DAYS_ZH if source.chinese else DAYS
    day, sign = names[start], -1 if back else 1
    s = "s" if steps > 1 else ""
    if source.chinese:
        user = (
            f"今天是{day},{steps} 天{'前' if back else '后'}是星期几?",
            f"{day}的 {steps} 天{'前' if back else '后'}是哪一天?",
            f"从{day}往{'前' if back else '后'}数 {steps} 天是星期几?",
        )[form]
    else:
        user = (
            f"What day is {steps} day{s} {'before' if back else 'after'} {day}?",
            f"Today is {day}. What day {'was' if back else 'is'} it "
            + (f"{steps} day{s} ago?" if back else f"in {steps} day{s}?"),
            f"{day} {'minus' if back else 'plus'} {steps} day{s}?",
        )[form]
    lines = [f"0 {day}"] + [f"{i} {names[(start + sign * i) % 7]}" for i in range(1, steps + 1)]
    answer = names[(start + sign * steps) % 7]
    return Turn("dates", user, f"{steps} {'-' if back else '+'}\n" + "\n".join(lines), answer)


def _calendar(source: Source) -> Turn:
    rng = source.rng
    while True:
        month, steps, back = rng.randrange(12), rng.randint(1, 9), rng.random() < 0.4
        day = rng.randint(1, LENGTHS[month])
        if source.allows(f"date {month} {day} {steps} {back}"):
            break

    def name(m: int, d: int) -> str:
        return f"{m + 1} 月 {d} 日" if source.chinese else f"{MONTHS[m]} {d}"

    s = "s" if steps > 1 else ""
    first = name(month, day)
    user = source.say(
        [
            f"What date is {steps} day{s} {'before' if back else 'after'} {first}?",
            f"Which date comes {steps} day{s} {'before' if back else 'after'} {first}?",
        ],
        [f"{first}的 {steps} 天{'前' if back else '后'}是几月几日?"],
    )
    lines = [f"0 {first}"]
    for i in range(1, steps + 1):
        if back:
            day -= 1
            if day == 0:
                month = (month - 1) % 12
                day = LENGTHS[month]
        else:
            day += 1
            if day > LENGTHS[month]:
                month, day = (month + 1) % 12, 1
        lines.append(f"{i} {name(month, day)}")
    work = f"{steps} {'-' if back else '+'}\n" + "\n".join(lines)
    return Turn("dates", user, work, name(month, day))
