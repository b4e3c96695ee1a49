# SPDX-License-Identifier: Apache-2.0
"""Words that the tasks are filled with: made-up names, short lists, Chinese characters.

Made-up words come from syllables, so that copying one cannot be learnt by heart.
"""

from __future__ import annotations

import random


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = listed("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl st tr sh ch th")
_VOWELS = listed("a e i o u ai ea io ou")
_CODAS = ["", "", "", "n", "r", "s", "l", "m", "t", "x", "k", "nd", "st"]

PEOPLE = listed(
    "Anna Omar Lena Marco Ines Yuki Tomas Aisha Peter Nora Ivan Clara Hugo Mina Leo Sara Jonas "
    "Emma Felix Maya Daniel Ruth Simon Ella Victor Grace Adam Julia Oscar Lucy Max Eva Paul Kim"
)
CITIES = listed(
    "Oslo Rome Paris Berlin Tokyo Lima Cairo Delhi Madrid Vienna Prague Athens Dublin Lisbon "
    "Boston Sydney Toronto Geneva Munich Milan Kyoto Seoul Hanoi Nairobi Porto Riga Zurich"
)
COLOURS = listed("red blue green yellow black white grey brown pink purple orange silver")
THINGS = listed(
    "ticket order invoice room report message meeting task note book file user account lamp door "
    "table camera song video photo price product package flight train hotel recipe event contact "
    "alarm timer reminder server device sensor ticket letter car bike garden machine project team "
    "student course lesson exam game player score map route station bridge tower"
)
ADJECTIVES = listed(
    "old new big small quiet broken fast slow cold warm dark bright heavy light round empty full "
    "clean dusty wooden strange famous cheap narrow"
)
SURNAME_CHARS = "王李张刘陈杨赵黄周吴徐孙马朱胡林何高罗郑"
GIVEN_CHARS = "明丽伟芳强静军洋勇艳杰娟涛超霞平刚英华玉云海山雪梅文安宁东南西北春秋"
CITIES_ZH = listed("北京 上海 广州 深圳 杭州 南京 成都 武汉 西安 天津 青岛 大连 长沙 昆明")
COLOURS_ZH = listed("红色 蓝色 绿色 黄色 黑色 白色 灰色 紫色")
THINGS_ZH = listed(
    "订单 房间 报告 会议 任务 文件 账户 灯 门 相机 歌曲 照片 包裹 航班 酒店 提醒 设备 书"
)


def word(rng: random.Random, syllables: int = 0) -> str:
    """A made-up lower-case word."""
    parts = []
    for _ in range(syllables or rng.choice((1, 2, 2, 3))):
        parts.append(rng.choice(_ONSETS) + rng.choice(_VOWELS))
    return "".join(parts) + rng.choice(_CODAS)


def person(rng: random.Random, chinese: bool) -> str:
    if chinese:
        given = "".join(rng.choice(GIVEN_CHARS) for _ in range(rng.choice((1, 2, 2))))
        return rng.choice(SURNAME_CHARS) + given
    return rng.choice(PEOPLE) if rng.random() < 0.3 else word(rng, 2).capitalize()


def city(rng: random.Random, chinese: bool) -> str:
    if chinese:
        return rng.choice(CITIES_ZH)
    return rng.choice(CITIES) if rng.random() < 0.6 else word(rng, 2).capitalize()


def phrase(rng: random.Random, chinese: bool) -> str:
    """Two or three words as a title has them."""
    if chinese:
        return rng.choice(COLOURS_ZH) + "的" + rng.choice(THINGS_ZH)
    first = rng.choice(ADJECTIVES) if rng.random() < 0.7 else word(rng)
    second = rng.choice(THINGS) if rng.random() < 0.7 else word(rng)
    return f"{first} {second}" + (f" {word(rng)}" if rng.random() < 0.3 else "")


def number(rng: random.Random, digits: int) -> int:
    """Uniform with exactly that many digits."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
