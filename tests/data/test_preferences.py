"""Preference sets: pairs, labels, rated images and demonstrations, and the errors of their rows."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from malicious_files import png_header
from PIL import Image
from pyarrow import parquet
from user_errors import raises_user_error

from flow_grpo.data.preference_checks import check_preferences
from flow_grpo.data.preferences import (
    check_preferences_exist,
    find_preferences,
    load_preferences,
)

SINGLE = SimpleNamespace(process_index=0, num_processes=1)
PAIR = {"prompt": "a", "chosen": "red.png", "rejected": "blue.png"}
COLORS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200), "gray": (90, 90, 90)}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory with one image per color."""
    for name, color in COLORS.items():
        Image.new("RGB", (32, 32), color).save(tmp_path / f"{name}.png")
    return tmp_path


def write(folder: Path, *rows: dict, name: str = "pairs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names(pairs) -> list[tuple[str, str, str]]:
    """Return prompt and file names of pairs."""
    return [(p.prompt.prompt, p.chosen.stem, p.rejected.stem) for p in pairs]


def test_pairs_with_several_rejected_and_probability(folder):
    path = write(
        folder,
        {"prompt": "a", "chosen": "red.png", "rejected": "blue.png"},
        {"caption": "b", "chosen": "red.png", "rejected": ["blue.png", "green.png"]},
        {"prompt": "c", "chosen": "red.png", "rejected": "blue.png", "probability": 0.25},
        {"prompt": "d", "chosen": "red.png", "rejected": "blue.png", "probability": 0.5},
    )
    found = load_preferences(path)
    assert names(found.pairs) == [
        ("a", "red", "blue"),
        ("b", "red", "blue"),
        ("b", "red", "green"),
        ("c", "blue", "red"),  # the other way round
    ]
    assert [pair.probability for pair in found.pairs] == [1, 1, 1, 0.75]
    assert found.left_out == {"ties": 1}
    assert [r.liked for r in found.rated()] == [True, False] * 4
    assert [d.image.stem for d in found.demonstrations()] == ["red", "red", "red", "blue"]
    assert found.pairs[0].prompt.where == f"{path}:1"


def test_pick_a_pic(folder):
    row = {
        "caption": "a",
        "jpg_0": "red.png",
        "jpg_1": "blue.png",
        "image_0_url": "https://x/0.png",
    }
    path = write(
        folder,
        row | {"label_0": 1.0, "label_1": 0.0},
        row | {"label_0": 0, "user_id": 3, "caption": "b"},
        row | {"label_0": 0.5, "caption": "c"},
        row | {"label_0": 1, "has_label": False},
        row | {"label_0": 1, "jpg_1": "red.png", "are_different": False},
    )
    found = load_preferences(path)
    assert names(found.pairs) == [("a", "red", "blue"), ("b", "blue", "red")]
    assert found.left_out == {"unlabelled": 1, "identical": 1, "ties": 1}


def test_judgements_of_the_same_pair_are_averaged(folder):
    """Two of three people prefer red; two others disagree, which is a tie."""
    row = {"caption": "a", "jpg_0": "red.png", "jpg_1": "blue.png"}
    turned = {"caption": "a", "jpg_0": "blue.png", "jpg_1": "red.png"}
    other = row | {"caption": "b"}
    labelled = [(row, 1), (row, 0), (turned, 0), (other, 1), (other, 0)]
    path = write(folder, *(each | {"label_0": label} for each, label in labelled))
    found = load_preferences(path)
    assert names(found.pairs) == [("a", "red", "blue")]
    assert found.pairs[0].probability == pytest.approx(2 / 3)
    assert found.left_out == {"ties": 1}


def test_given_pairs_that_contradict_each_other(folder):
    """Equal rows are kept: a user may repeat a pair to give it more weight."""
    turned = PAIR | {"chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
    assert len(load_preferences(write(folder, PAIR, PAIR)).pairs) == 2
    path = write(folder, PAIR, PAIR | {"prompt": "b"}, turned)
    with raises_user_error(f"{path}:1", field=f"{path}:3"):
        load_preferences(path)


def test_hpd_v2_rankings(folder):
    """Images of train.json are in the folder train; the lowest rank is the best."""
    (folder / "train").mkdir()
    for name in COLORS:
        (folder / f"{name}.png").rename(folder / "train" / f"{name}.png")
    rows = [
        {"prompt": "a", "file_path": ["red.png", "blue.png"], "human_preference": [0, 1]},
        {"prompt": "b", "image_path": ["red.png", "blue.png", "gray.png"], "rank": [1, 0, 1]},
    ]
    (folder / "train.json").write_text(json.dumps([row | {"user_hash": "x"} for row in rows]))
    found = load_preferences(folder)
    assert names(found.pairs) == [("a", "blue", "red"), ("b", "blue", "red"), ("b", "blue", "gray")]
    assert found.left_out == {"ties": 1}


def test_hpd_v3(folder):
    row = {"prompt": "a", "path1": "red.png", "path2": "blue.png", "confidence": 0.9}
    (folder / "test.json").write_text(json.dumps([row | {"model1": "x", "choice_dist": [9, 1]}]))
    found = find_preferences(folder, "test")
    assert names(found.pairs) == [("a", "red", "blue")]
    assert find_preferences(folder, "train") is None


VOTE = {"prompt": "a", "chosen": "red.png", "rejected": "blue.png", "choice": "first", "time": "t"}
AGAINST = VOTE | {"chosen": "blue.png", "rejected": "red.png", "choice": "second"}
TIE = {"prompt": "a", "choice": "tie"}
SKIP = {"prompt": "a", "choice": "skip"}


def vote(number: int, row: dict, *, ballot: str = "x", voter: str = "") -> dict:
    return row | {"id": f"v{number}", "ballot": ballot, "voter": voter or f"voter {number}"}


def undo(number: int, voter: str = "") -> dict:
    return {"undo": f"v{number}", "voter": voter or f"voter {number}"}


@pytest.mark.parametrize(
    ("lines", "chosen", "probability", "left_out"),
    [
        ([vote(1, VOTE)], "red", 1, {}),
        ([vote(1, VOTE), vote(1, VOTE)], "red", 1, {}),  # sent twice
        ([vote(1, VOTE), vote(2, AGAINST), vote(3, AGAINST)], "blue", 2 / 3, {}),
        ([vote(1, VOTE), vote(2, TIE)], "red", 3 / 4, {}),
        ([vote(1, VOTE), vote(2, SKIP)], "red", 1, {"skipped": 1}),
        ([vote(1, AGAINST), undo(1), vote(2, VOTE)], "red", 1, {"undone": 1}),
        ([vote(1, AGAINST, voter="ann"), vote(2, VOTE, voter="ann")], "red", 1, {}),
        ([vote(1, VOTE), vote(2, TIE, ballot="y")], "red", 1, {"ties": 1}),
        (
            [vote(1, VOTE), vote(2, VOTE | {"rejected": "red.png"}, ballot="y")],
            "red", 1, {"identical": 1},
        ),
        (
            [vote(1, VOTE), *(vote(n, VOTE | {"prompt": "b"}, ballot="y") for n in (2, 3)),
             vote(4, AGAINST | {"prompt": "b"}, ballot="y"),
             vote(5, AGAINST | {"prompt": "b"}, ballot="y")],
            "red", 1, {"ties": 1},
        ),
    ],
)  # fmt: skip
def test_votes(folder, lines, chosen, probability, left_out):
    write(folder, *lines, name="votes.jsonl")
    found = load_preferences(folder)
    assert [pair.chosen.stem for pair in found.pairs] == [chosen]
    assert found.pairs[0].probability == pytest.approx(probability)
    assert found.left_out == left_out


def test_votes_on_edits(folder):
    write(folder, vote(1, VOTE | {"source_image": "gray.png"}), name="votes.jsonl")
    [pair] = load_preferences(folder).pairs
    assert [image.stem for image in pair.prompt.images] == ["gray"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (vote(2, VOTE) | {"choice": "third"}, "third"),
        (vote(2, TIE) | {"choice": "first"}, "chosen"),
        (vote(2, VOTE | {"rejected": "gray.png"}), "votes.jsonl:1"),
        (vote(2, VOTE) | {"voter": None}, "voter"),
        (vote(2, VOTE | {"prompt": "b"}), "votes.jsonl:1"),
        (vote(1, AGAINST), "votes.jsonl:1"),
        (undo(1, voter="somebody else"), "v1"),
        (undo(7), "v7"),
    ],
)
def test_invalid_votes(folder, line, shown):
    path = write(folder, vote(1, VOTE), line, name="votes.jsonl")
    with raises_user_error(shown, field=f"{path}:2"):
        load_preferences(path)


def test_csv_and_parquet(folder):
    table = folder / "train.csv"
    table.write_text('caption;chosen;rejected\n"a; b";red.png;blue.png\n')
    assert names(load_preferences(folder).pairs) == [("a; b", "red", "blue")]
    table.unlink()
    content = {name: (folder / f"{name}.png").read_bytes() for name in ("red", "blue")}
    row = {"caption": "a", "jpg_0": content["red"], "jpg_1": content["blue"], "label_0": 0.0}
    row["created_at"] = datetime(2023, 1, 2, tzinfo=UTC)
    for shard in range(2):
        name = folder / "data" / f"train-0000{shard}-of-00002.parquet"
        name.parent.mkdir(exist_ok=True)
        image = {"caption": f"prompt {shard}"}
        parquet.write_table(pyarrow.Table.from_pylist([row | image]), name)
    pairs = load_preferences(folder).pairs
    assert [pair.prompt.prompt for pair in pairs] == ["prompt 0", "prompt 1"]
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [
        (content["blue"], content["red"])
    ] * 2


def test_folders_of_images(folder):
    for name, caption in {"red": "a", "blue": "b", "green": "c", "gray": "d"}.items():
        (folder / f"{name}.txt").write_text(caption)
    found = load_preferences(folder)
    assert [(r.prompt.prompt, r.image.stem) for r in found.demonstrations()] == [
        *(("b", "blue"), ("d", "gray"), ("c", "green"), ("a", "red")),
    ]
    assert not found.images[0].prompt.images
    for part in ("chosen", "rejected"):
        (folder / part).mkdir()
        shutil.copy(folder / "red.png", folder / part / "1.png")
    (folder / "chosen" / "1.txt").write_text("a")
    [pair] = load_preferences(folder).pairs
    assert (pair.prompt.prompt, pair.chosen.parent.name) == ("a", "chosen")
    (folder / "rejected" / "1.png").rename(folder / "rejected" / "2.png")
    with raises_user_error(field=str(folder / "chosen" / "1.png")):
        load_preferences(folder)
    shutil.copy(folder / "red.png", folder / "rejected" / "1.png")
    with raises_user_error(field=str(folder / "rejected" / "2.png")):
        load_preferences(folder)


def test_a_missing_set(folder):
    with raises_user_error(field="preferences.data", value=str(folder / "pear.jsonl")):
        check_preferences_exist(str(folder / "pear.jsonl"))
    with raises_user_error(field="preferences.data", value=str(folder)):
        load_preferences(folder, "test")


class TestDecoding:
    """`check_preferences` decodes what `load_preferences` has found."""

    def check(self, folder: Path, row: dict, **options) -> str:
        path = write(folder, PAIR | {"prompt": "another"}, row)
        found = load_preferences(path)
        check_preferences(found, SINGLE, **options)
        return f"{path}:2"

    @pytest.mark.parametrize("column", ["rejected", "source_image"])
    def test_damaged_images(self, folder, column):
        (folder / "bad.png").write_bytes((folder / "gray.png").read_bytes()[:60])
        with raises_user_error("pairs.jsonl:2", "bad.png"):
            self.check(folder, PAIR | {column: "bad.png"})

    def test_a_demonstration_of_60000_pixels_a_side(self, folder):
        """It is rejected by its header."""
        (folder / "huge.png").write_bytes(png_header(60_000, 60_000))
        with raises_user_error("pairs.jsonl:2", "huge.png"):
            self.check(folder, {"prompt": "a", "image": "huge.png"})

    def test_the_same_pixels_in_two_files(self, folder):
        Image.new("RGB", (32, 32), COLORS["red"]).save(folder / "copy.bmp")
        with raises_user_error(field=f"{folder / 'pairs.jsonl'}:2"):
            self.check(folder, PAIR | {"rejected": "copy.bmp"})

    def test_unlike_sizes(self, folder):
        Image.new("RGB", (64, 32)).save(folder / "wide.png")
        row = PAIR | {"rejected": "wide.png"}
        with raises_user_error("32 x 32", "64 x 32", field=f"{folder / 'pairs.jsonl'}:2"):
            self.check(folder, row)
        self.check(folder, row, allow_unlike_sizes=True)

    def test_each_process_decodes_its_rows(self, folder):
        """The damaged image is in the second row."""
        (folder / "bad.png").write_bytes(b"none")
        path = write(folder, PAIR, PAIR | {"rejected": "bad.png"})
        found = load_preferences(path)
        check_preferences(found, SimpleNamespace(process_index=0, num_processes=2))
        with raises_user_error("pairs.jsonl:2", "bad.png"):
            check_preferences(found, SimpleNamespace(process_index=1, num_processes=2))


def test_rated_images_and_demonstrations(folder):
    path = write(
        folder,
        {"prompt": "a", "image": "red.png", "liked": True},
        {"prompt": "a", "image": "blue.png", "label": 0},
        {"prompt": "b", "image": "green.png"},
    )
    found = load_preferences(path)
    rated = [(each.image.stem, each.liked) for each in found.rated()]
    assert rated == [("red", True), ("blue", False), ("green", True)]
    assert [each.image.stem for each in found.demonstrations()] == ["red", "green"]


def test_source_images_of_edits(folder):
    path = write(
        folder,
        {"prompt": "a", "image": "gray.png", "chosen": "red.png", "rejected": "blue.png"},
        {"prompt": "a", "source_image": "gray.png", "image": "red.png", "style": "flat"},
    )
    found = load_preferences(path)
    prompts = [found.pairs[0].prompt, found.images[0].prompt]
    assert [[image.stem for image in prompt.images] for prompt in prompts] == [["gray"]] * 2
    assert prompts[1].metadata == {"prompt": "a", "style": "flat"}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"chosen": "red.png", "rejected": "blue.png"}, ["prompt"]),
        (PAIR | {"prompt": " "}, ["prompt"]),
        (PAIR | {"rejected": "missing.png"}, ["missing.png"]),
        (PAIR | {"rejected": []}, ["rejected"]),
        ({"prompt": "a", "chosen": "red.png"}, ["rejected"]),
        (PAIR | {"probability": 1.5}, ["1.5"]),
        (PAIR | {"probability": float("nan")}, ["nan"]),
        ({"prompt": "a", "jpg_0": "red.png", "jpg_1": "blue.png", "label_0": -1}, ["label_0"]),
        ({"prompt": "a", "jpg_0": "red.png", "jpg_1": "blue.png"}, ["label_0"]),
        ({"prompt": "a", "image": "red.png", "label": 0.4}, ["0.4"]),
        ({"prompt": "a", "winner": "red.png", "loser": "blue.png"}, ["winner"]),
        (PAIR | {"depth_image": "gray.png"}, ["depth_image"]),
        (PAIR | {"label": 0}, ["label"]),
        ({"prompt": "a", "image": "red.png", "Disliked": 1}, ["Disliked"]),
        ({"prompt": "a", "image": "red.png", "probability": 0.1}, ["probability"]),
        ({"prompt": "a", "image": "red.png", "label": None}, ["label"]),
        ({"prompt": "a", "image": "red.png", "label": 0, "liked": 1}, ["liked"]),
        (PAIR | {"rejected": "red.png"}, ["rejected"]),
        (PAIR | {"chosen": ["red.png", "gray.png"]}, ["chosen"]),
        ({"prompt": "a", "file_path": ["red.png"], "rank": [1]}, ["rank"]),
        ({"prompt": "a", "images": ["red.png", "blue.png"], "rank": [1]}, ["rank"]),
    ],
)
def test_invalid_rows_are_named(folder, row, shown):
    path = write(folder, PAIR, row)
    with raises_user_error(*shown, field=f"{path}:2"):
        load_preferences(path)


def test_nothing_but_ties(folder):
    path = write(folder, PAIR | {"probability": 0.5}, PAIR | {"probability": 0.5})
    with raises_user_error("2 ties", field=str(path)):
        load_preferences(path)
