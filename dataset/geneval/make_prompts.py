"""Writes compositional prompts in GenEval's layout, one JSON object per line.

    python dataset/geneval/make_prompts.py coco dataset/geneval --size 50000
    python dataset/geneval/make_prompts.py scenes dataset/scenes --size 1920

coco: things of COCO's 80 classes; test_unseen_metadata.jsonl has classes that training never sees.
scenes: coloured shapes, as the small model of this repo draws them.
No prompt, and no pair of things, is both in those for training and in those for testing.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from flow_grpo.config.mistakes import Parser
from flow_grpo.errors import UserError
from flow_grpo.rewards.scorers.geneval.rules import COLOURS, NAMES, RELATIONS, RGB, SHAPES

NUMBERS = {2: "two", 3: "three", 4: "four"}
UNCOLOURED = ("person",)  # a purple person is no fair question
UNSEEN = 20  # classes
TEST_SHARE = 0.1
PLURALS = {
    "person": "people",
    "knife": "knives",
    "mouse": "mice",
    "sheep": "sheep",
    "skis": "skis",
    "scissors": "scissors",
    "broccoli": "broccoli",
}
Row = dict[str, Any]


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    *first, last = name.split(" ")
    if last in PLURALS:
        last = PLURALS[last]
    elif last.endswith(("s", "x", "ch", "sh")):
        last += "es"
    else:
        last += "s"
    return " ".join([*first, last])


def row(tag: str, words: str, include: list[Row], exclude: tuple[Row, ...] = ()) -> Row:
    return {
        "tag": tag,
        "include": include,
        **({"exclude": list(exclude)} if exclude else {}),
        "prompt": words,
    }


def thing(name: str, count: int = 1, **more: Any) -> Row:
    return {"class": name, "count": count, **more}


def coco_single(name: str) -> list[Row]:
    """What can be asked of one thing."""
    rows = [row("single_object", f"a photo of {article(name)}", [thing(name)])]
    for count, number in NUMBERS.items():
        words = f"a photo of {number} {plural(name)}"
        rows.append(row("counting", words, [thing(name, count)], (thing(name, count + 1),)))
    for colour in COLOURS if name not in UNCOLOURED else ():
        words = f"a photo of {article(f'{colour} {name}')}"
        rows.append(row("colors", words, [thing(name, color=colour)]))
    return rows


def coco_pair(a: str, b: str, rng: random.Random) -> list[Row]:
    """One of each kind of what can be asked of two."""
    relation, (colour, other) = rng.choice(RELATIONS), rng.sample(COLOURS, 2)
    both = f"a photo of {article(a)} and {article(b)}"
    placed = f"a photo of {article(a)} {relation} {article(b)}"
    rows = [
        row("two_object", both, [thing(a), thing(b)]),
        row("position", placed, [thing(b), thing(a, position=[relation, 0])]),
    ]
    if not {a, b} & set(UNCOLOURED):
        words = f"a photo of {article(f'{colour} {a}')} and {article(f'{other} {b}')}"
        rows.append(row("color_attr", words, [thing(a, color=colour), thing(b, color=other)]))
    return rows


def scene(groups: list[tuple[str, str, int]], relation: str = "") -> Row:
    """Groups of shapes; nothing more than what is named may be there."""
    words = [
        article(f"{colour} {shape}") if count == 1 else f"{NUMBERS[count]} {colour} {shape}s"
        for colour, shape, count in groups
    ]
    include = [thing(shape, count, color=colour) for colour, shape, count in groups]
    if relation:
        include = [include[1], {**include[0], "position": [relation, 0]}]
    total = {s: sum(count for _, shape, count in groups if shape == s) for s in SHAPES}
    exclude = [thing(shape, count + 1) for shape, count in total.items()]
    tag = "position" if relation else "color_attr" if len(groups) > 1 else "counting"
    sentence = f" {relation or 'and'} ".join(words)
    return row(tag, sentence, include, (*exclude, thing("smudge")))


def scene_single(kind: tuple[str, str]) -> list[Row]:
    return [scene([(*kind, count)]) for count in range(1, 5)]


def scene_pair(a: tuple[str, str], b: tuple[str, str], rng: random.Random) -> list[Row]:
    counts = rng.choice([(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)])
    return [
        scene([(*a, 1), (*b, 1)], rng.choice(RELATIONS[:2])),
        scene([(*a, counts[0]), (*b, counts[1])]),
    ]


@dataclass(frozen=True)
class Questions:
    """What can be asked of one thing, and of two."""

    things: list[Any]
    single: Callable[[Any], list[Row]]
    pair: Callable[[Any, Any, random.Random], list[Row]]

    def splits(self, size: int, rng: random.Random) -> dict[str, list[Row]]:
        singles = split([r for each in self.things for r in self.single(each)], rng)
        couples = split(list(combinations(self.things, 2)), rng)
        tests = round(size * TEST_SHARE)
        sizes = {"test": tests, "train": size - tests}
        parts = zip(sizes, singles, couples, strict=True)
        return {name: self.draw(sizes[name], own, two, rng) for name, own, two in parts}

    def draw(
        self, count: int, singles: list[Row], couples: list[tuple[Any, Any]], rng: random.Random
    ) -> list[Row]:
        """As many of each tag as there are different ones."""
        by_tag: dict[str, dict[str, Row]] = {}
        rows = list(singles)
        for _ in range(max(1, 4 * count // len(couples))):
            for couple in couples:
                rows += self.pair(*rng.sample(couple, 2), rng)
        for each in rng.sample(rows, len(rows)):
            by_tag.setdefault(each["tag"], {})[each["prompt"]] = each
        in_turn = zip_longest(*(list(found.values()) for found in by_tag.values()))
        chosen = [each for turn in in_turn for each in turn if each][:count]
        if len(chosen) < count:
            raise UserError(f"there are only {len(chosen)} different prompts; lower --size")
        return chosen


def split(items: list[Any], rng: random.Random) -> tuple[list[Any], list[Any]]:
    """For testing and for training."""
    items = rng.sample(items, len(items))
    tests = round(len(items) * TEST_SHARE)
    return items[:tests], items[tests:]


def coco(size: int, rng: random.Random) -> dict[str, list[Row]]:
    names = rng.sample(NAMES, len(NAMES))
    seen, unseen = (Questions(n, coco_single, coco_pair) for n in (names[UNSEEN:], names[:UNSEEN]))
    singles = [r for each in unseen.things for r in coco_single(each)]
    couples = list(combinations(unseen.things, 2))
    tests = round(size * TEST_SHARE)
    return {**seen.splits(size, rng), "test_unseen": unseen.draw(tests, singles, couples, rng)}


def scenes(size: int, rng: random.Random) -> dict[str, list[Row]]:
    kinds = [(colour, shape) for colour in RGB for shape in SHAPES]
    return Questions(kinds, scene_single, scene_pair).splits(size, rng)


SETS = {"coco": coco, "scenes": scenes}


def write(folder: Path, splits: dict[str, list[Row]]) -> None:
    paths = {name: folder / f"{name}_metadata.jsonl" for name in splits}
    there = [path for path in paths.values() if path.exists()]
    if there:
        raise UserError(f"{there[0]} is there already; name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        paths[name].write_text(lines, encoding="utf-8")
        print(f"wrote {len(rows)} prompts to {paths[name]}")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=6000, help="of training and test together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.size < 60:
        parser.fail(f"--size={options.size} must be 60 or more")
    try:
        write(options.folder, SETS[options.set](options.size, random.Random(options.seed)))
    except UserError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
