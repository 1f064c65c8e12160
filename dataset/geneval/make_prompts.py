"""Write compositional prompts in GenEval's format, one JSON object per line.

    python dataset/geneval/make_prompts.py coco dataset/geneval --size 50000
    python dataset/geneval/make_prompts.py scenes dataset/scenes --size 1920

coco: objects of COCO's 80 classes; test_unseen_metadata.jsonl has classes that are not in training.
scenes: coloured shapes, which assets/tiny-sd3 draws.
The training and test sets have no prompt and no pair of objects in common.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.rewards.scorers.geneval.rules import COCO_CLASSES, COLOURS, RELATIONS, RGB, SHAPES

NUMBERS = {2: "two", 3: "three", 4: "four"}
UNCOLOURED = ("person",)  # has no colour in prompts
UNSEEN = 20  # classes that are held out
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


def obj(name: str, count: int = 1, **more: Any) -> Row:
    return {"class": name, "count": count, **more}


def coco_single(name: str) -> list[Row]:
    """Return all prompts with one class."""
    rows = [row("single_object", f"a photo of {article(name)}", [obj(name)])]
    for count, number in NUMBERS.items():
        words = f"a photo of {number} {plural(name)}"
        rows.append(row("counting", words, [obj(name, count)], (obj(name, count + 1),)))
    for colour in COLOURS if name not in UNCOLOURED else ():
        words = f"a photo of {article(f'{colour} {name}')}"
        rows.append(row("colors", words, [obj(name, color=colour)]))
    return rows


def coco_pair(a: str, b: str, rng: random.Random) -> list[Row]:
    """Return one prompt of each kind with two classes."""
    relation, (colour, other) = rng.choice(RELATIONS), rng.sample(COLOURS, 2)
    both = f"a photo of {article(a)} and {article(b)}"
    placed = f"a photo of {article(a)} {relation} {article(b)}"
    rows = [
        row("two_object", both, [obj(a), obj(b)]),
        row("position", placed, [obj(b), obj(a, position=[relation, 0])]),
    ]
    if not {a, b} & set(UNCOLOURED):
        words = f"a photo of {article(f'{colour} {a}')} and {article(f'{other} {b}')}"
        rows.append(row("color_attr", words, [obj(a, color=colour), obj(b, color=other)]))
    return rows


def scene(groups: list[tuple[str, str, int]], relation: str = "") -> Row:
    """Return a prompt for groups of shapes, which excludes any other shape."""
    words = [
        article(f"{colour} {shape}") if count == 1 else f"{NUMBERS[count]} {colour} {shape}s"
        for colour, shape, count in groups
    ]
    include = [obj(shape, count, color=colour) for colour, shape, count in groups]
    if relation:
        include = [include[1], {**include[0], "position": [relation, 0]}]
    total = {s: sum(count for _, shape, count in groups if shape == s) for s in SHAPES}
    exclude = [obj(shape, count + 1) for shape, count in total.items()]
    tag = "position" if relation else "color_attr" if len(groups) > 1 else "counting"
    sentence = f" {relation or 'and'} ".join(words)
    return row(tag, sentence, include, (*exclude, obj("smudge")))


def scene_single(kind: tuple[str, str]) -> list[Row]:
    return [scene([(*kind, count)]) for count in range(1, 5)]


def scene_pair(a: tuple[str, str], b: tuple[str, str], rng: random.Random) -> list[Row]:
    counts = rng.choice([(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)])
    return [
        scene([(*a, 1), (*b, 1)], rng.choice(RELATIONS[:2])),
        scene([(*a, counts[0]), (*b, counts[1])]),
    ]


@dataclass(frozen=True)
class PromptGenerator:
    """Generates prompts about one object and about two."""

    objects: list[Any]
    single: Callable[[Any], list[Row]]
    pair: Callable[[Any, Any, random.Random], list[Row]]

    def splits(self, size: int, rng: random.Random) -> dict[str, list[Row]]:
        singles = split([r for each in self.objects for r in self.single(each)], rng)
        pairs = split(list(combinations(self.objects, 2)), rng)
        tests = round(size * TEST_SHARE)
        sizes = {"test": tests, "train": size - tests}
        parts = zip(sizes, singles, pairs, strict=True)
        return {name: self.draw(sizes[name], one, two, rng) for name, one, two in parts}

    def draw(
        self, count: int, singles: list[Row], pairs: list[tuple[Any, Any]], rng: random.Random
    ) -> list[Row]:
        """Sample `count` distinct prompts, balanced over the tags as far as possible."""
        by_tag: dict[str, dict[str, Row]] = {}
        rows = list(singles)
        for _ in range(max(1, 4 * count // len(pairs))):
            for pair in pairs:
                rows += self.pair(*rng.sample(pair, 2), rng)
        for each in rng.sample(rows, len(rows)):
            by_tag.setdefault(each["tag"], {})[each["prompt"]] = each
        interleaved = zip_longest(*(list(found.values()) for found in by_tag.values()))
        chosen = [each for group in interleaved for each in group if each][:count]
        if len(chosen) < count:
            raise UserError(f"there are only {len(chosen)} distinct prompts", hint="lower --size")
        return chosen


def split(items: list[Any], rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Split randomly into test and training items."""
    items = rng.sample(items, len(items))
    tests = round(len(items) * TEST_SHARE)
    return items[:tests], items[tests:]


def coco(size: int, rng: random.Random) -> dict[str, list[Row]]:
    names = rng.sample(COCO_CLASSES, len(COCO_CLASSES))
    seen = PromptGenerator(names[UNSEEN:], coco_single, coco_pair)
    unseen = PromptGenerator(names[:UNSEEN], coco_single, coco_pair)
    singles = [r for each in unseen.objects for r in coco_single(each)]
    pairs = list(combinations(unseen.objects, 2))
    tests = round(size * TEST_SHARE)
    return {**seen.splits(size, rng), "test_unseen": unseen.draw(tests, singles, pairs, rng)}


def scenes(size: int, rng: random.Random) -> dict[str, list[Row]]:
    kinds = [(colour, shape) for colour in RGB for shape in SHAPES]
    return PromptGenerator(kinds, scene_single, scene_pair).splits(size, rng)


SETS = {"coco": coco, "scenes": scenes}


def write(folder: Path, splits: dict[str, list[Row]]) -> None:
    paths = {name: folder / f"{name}_metadata.jsonl" for name in splits}
    for path in paths.values():
        if path.exists():
            raise UserError("already exists", field=path, hint="use another directory or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        paths[name].write_text(lines, encoding="utf-8")
        print(f"wrote {len(rows)} prompts to {paths[name]}")


def main() -> None:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=6000, help="training and test prompts in total")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.size < 60:
        parser.fail(f"--size={options.size} must be at least 60")
    try:
        write(options.folder, SETS[options.set](options.size, random.Random(options.seed)))
    except UserError as error:
        parser.fail(str(error))


if __name__ == "__main__":
    main()
