"""Write prompt sets for the OCR reward: one prompt per line, the text to draw in double quotes.

`tiny`: `a sign that says "WORD"` for the small model; `full`: generated sentences for full-size
models. The same seed gives the same files; train.txt and test.txt have no text in common.

    python scripts/make_ocr.py full --words my_words.txt --size 2000 --out dataset/mine
"""

import random
from itertools import cycle, islice
from pathlib import Path

from tiny.prompts import parse_sign, sign_prompt
from tiny.words import all_words, split_words

from flow_grpo.config.error_reporting import ScriptParser

FULL_TRAIN, FULL_TEST = 10_000, 1_000
MAX_PROMPTS = 100_000  # well below the number of different texts and sentences
QUOTES = '"“”„«»'  # the OCR reward reads the text between them


def _phrases(text: str) -> list[str]:
    return text.split("|")


ADJECTIVES = str.split(
    "Golden Silent Lucky Wild Little Royal Hidden Early Brave Crimson Frozen Gentle Happy Hollow "
    "Humble Iron Lazy Lost Merry Modern Noble Northern Old Quiet Rapid Rustic Salty Secret Silver "
    "Sleepy Slow Southern Spicy Sunny Swift Tiny Velvet Wandering Warm Wooden"
)
NOUNS = str.split(
    "Anchor Bakery Bicycle Bridge Cabin Candle Castle Circus Clock Coffee Comet Compass Copper "
    "Dragon Engine Falcon Feather Festival Forest Fountain Garden Guitar Hammer Harbor Harvest "
    "Honey Island Kettle Kitchen Ladder Lantern Lemon Library Lighthouse Market Meadow Mirror "
    "Moon Mountain Museum Ocean Orchard Owl Paper Pepper Piano Planet Rabbit Radio River Robot "
    "Rocket Saddle School Shadow Sparrow Station Studio Summer Theater Thunder Tiger Tower Train "
    "Tunnel Valley Village Violin Voyage Whale Willow Window Winter Workshop"
)
VERBS = str.split(
    "Ask Begin Build Carry Catch Chase Choose Climb Count Draw Enter Find Fix Follow Grow Guard "
    "Hold Keep Learn Leave Lift Open Paint Plant Protect Read Remember Repair Ride Save Share "
    "Sing Start Taste Trust Visit Wait Wash Watch Write"
)
TAILS = _phrases(
    "Today|Tonight|Tomorrow|Before Noon|After Dark|By Hand|For Free|Once Again|Right Now|"
    "With Care|Without Fear|On Sunday|Since Monday|All Year|Next Door|Upstairs|Together|Slowly"
)

CARRIERS = _phrases(
    "a shop sign|a street banner|a chalkboard|a neon sign|a paper ticket|a book cover|a coffee mug|"
    "a road sign|a wooden plank|a train station board|a birthday cake|a cardboard box|a t-shirt|"
    "a tote bag|a movie poster|a cereal box|a brass plaque|a garden gate|a delivery van|"
    "a hot air balloon|a wine label|a museum placard|a sticky note|a postage stamp|a surfboard|"
    "a backpack patch|a theater marquee|a lighthouse door|a stone arch|a billboard"
)
DISPLAY_VERBS = _phrases(
    "that says|that reads|with the words|showing the text|lettered with|marked|bearing the words|"
    "printed with"
)
PLACES = _phrases(
    "in a narrow alley|beside a frozen lake|on a busy square|at the edge of a forest|"
    "in a sunlit kitchen|under a railway bridge|on a rainy boulevard|inside an old library|"
    "at a night market|next to a tram stop|on a mountain trail|in a quiet courtyard|"
    "above a bakery door|near a fishing pier|on a rooftop terrace|in a greenhouse full of ferns|"
    "by a desert road|in a workshop full of tools|in front of a brick wall|at a village fair"
)
LETTERING = _phrases(
    "in bold white letters|in hand-painted script|in red capitals|in glowing blue tubes|"
    "in carved letters|in golden serif type|in chunky black print|in stitched thread|"
    "in peeling green paint|in neat chalk strokes"
)
STYLES = _phrases(
    "photograph|watercolor|film still|ink drawing|3D render|oil painting|flat illustration|"
    "close-up photograph|pencil sketch|polaroid"
)
LIGHTS = _phrases(
    "at dawn|at dusk|in soft morning light|under street lamps|on a foggy day|after the rain|"
    "at noon|on a winter evening"
)


def quoted_text(rng: random.Random) -> str:
    """Return one to five words in title case or capitals."""
    adjective, verb = rng.choice(ADJECTIVES), rng.choice(VERBS)
    noun, other = rng.sample(NOUNS, 2)
    tail = rng.choice(TAILS)
    text = rng.choice(
        (
            noun,
            f"{adjective} {noun}",
            f"{noun} {rng.randint(2, 99)}",
            f"{noun} & {other}",
            f"The {adjective} {noun}",
            f"{verb} the {noun}",
            f"{verb} the {adjective} {noun}",
            f"{verb} the {noun} {tail}",
            f"{noun} Meets {adjective} {other}",
            f"{adjective} {noun} {tail}",
        )
    )
    if len(text.split()) > 5:
        return quoted_text(rng)
    return text.upper() if rng.random() < 0.3 else text


def sentence(text: str, rng: random.Random) -> str:
    """Return a random image description that contains `text` in quotes."""
    carrier, place, light = rng.choice(CARRIERS), rng.choice(PLACES), rng.choice(LIGHTS)
    showing, lettering = rng.choice(DISPLAY_VERBS), rng.choice(LETTERING)
    style = rng.choice(STYLES)
    article = "an" if style[0] in "aeiou" else "a"
    prompt = rng.choice(
        (
            f'{carrier} {place} {showing} "{text}"',
            f'{carrier} {showing} "{text}" {lettering}, {light}',
            f'{article} {style} of {carrier} {showing} "{text}", {place}',
            f'{article} {style} of {carrier} {place}, "{text}" {lettering}',
            f'{place}, {carrier} {showing} "{text}" {lettering}',
            f'{light}, {carrier} {place} {showing} "{text}", {style}',
        )
    )
    return prompt[0].upper() + prompt[1:]


def tiny_prompts(
    seed: int, texts: list[str] | None = None, size: int | None = None
) -> tuple[list[str], list[str]]:
    """Return training and test prompts, one per word."""
    if texts is None and size is None:
        train, test = split_words(seed)
    else:
        words = all_words() if texts is None else [text.upper() for text in texts]
        for word in words:
            if parse_sign(sign_prompt(word)) is None:
                raise ValueError(f"{word!r} must be 3 to 6 letters of A to Z for the small model")
        size = len(words) if size is None else size
        if size > len(words):
            raise ValueError(f"--size={size} must be at most {len(words)}, the number of words")
        train, test = map(sorted, split_texts(random.Random(seed).sample(words, size)))
    return [sign_prompt(word) for word in train], [sign_prompt(word) for word in test]


def full_prompts(
    seed: int, texts: list[str] | None = None, size: int | None = None
) -> tuple[list[str], list[str]]:
    """Return training and test prompts, whose quoted texts differ for the OCR reward.

    If there are fewer `texts` than `size`, each text occurs in several sentences.
    """
    rng = random.Random(seed)
    if texts is not None:
        size = len(texts) if size is None else size
        parts = split_texts(rng.sample(texts, min(size, len(texts))))
        counts = size - test_size(size), test_size(size)
        return tuple(sentences(*each, rng) for each in zip(parts, counts, strict=True))
    total = FULL_TRAIN + FULL_TEST if size is None else size
    test = FULL_TEST if size is None else test_size(size)
    prompts: dict[str, str] = {}
    while len(prompts) < total:
        text = quoted_text(rng)
        prompts.setdefault(normalize_text(text), sentence(text, rng))
    # Short texts run out early: without shuffling, texts at the end would be longer.
    lines = list(prompts.values())
    rng.shuffle(lines)
    return lines[: total - test], lines[total - test :]


def sentences(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Return `count` different sentences, cycling through the texts."""
    prompts: dict[str, None] = {}  # an ordered set
    for text in islice(cycle(texts), count):
        while (prompt := sentence(text, rng)) in prompts:
            pass
        prompts[prompt] = None
    return list(prompts)


def normalize_text(text: str) -> str:
    return text.lower().replace(" ", "")


def test_size(size: int) -> int:
    return max(1, size // 10)


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return training and test texts; about a tenth, at the start of the list, are for testing."""
    if len(texts) < 2:
        raise ValueError(
            f"{len(texts)} texts cannot be split into train and test; at least 2 needed"
        )
    test = test_size(len(texts))
    return texts[test:], texts[:test]


def read_words(path: Path) -> list[str]:
    """Read one text per line, without texts that are equal for the OCR reward."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if any(quote in line for quote in QUOTES):
            raise ValueError(f"{path}:{number} must not contain quotes: {line.strip()}")
    return list({normalize_text(line): line.strip() for line in lines if line.strip()}.values())


SETS = {"tiny": ("dataset/ocr", tiny_prompts), "full": ("dataset/ocr_full", full_prompts)}


def main() -> None:
    """Write the prompts of the chosen set to a new directory."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument(
        "--out", type=Path, help="new directory; default: dataset/ocr or dataset/ocr_full"
    )
    parser.add_argument("--words", type=Path, help="file with the texts to use, one per line")
    parser.add_argument("--size", type=int, help="total number of prompts; a tenth is held out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    default, generate = SETS[args.set]
    folder = args.out or Path(default)
    try:
        if folder.exists():
            raise ValueError(f"{folder} already exists; remove it or use --out")
        if args.size is not None and not 2 <= args.size <= MAX_PROMPTS:
            raise ValueError(f"--size={args.size} must be from 2 to {MAX_PROMPTS}")
        splits = generate(args.seed, args.words and read_words(args.words), args.size)
        folder.mkdir(parents=True)
    except ValueError as error:
        parser.fail(str(error))
    except OSError as error:
        parser.fail(f"--out={folder} cannot be created: {error.strerror}; choose another directory")
    for name, prompts in zip(("train", "test"), splits, strict=True):
        path = folder / f"{name}.txt"
        path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
        print(f"wrote {len(prompts)} prompts to {path}")


if __name__ == "__main__":
    main()
