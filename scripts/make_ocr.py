"""Writes prompt sets for the OCR reward: one prompt per line, the text to draw in double quotes.

`tiny`: `a sign that says "WORD"` for the small model; `full`: sentences of our own making for
full-size models. The same seed gives the same files; no text of test.txt is in train.txt.
"""

import argparse
import random
from pathlib import Path

from tiny.prompts import sign_prompt
from tiny.words import split_words

FULL_TRAIN, FULL_TEST = 10_000, 1_000


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
VERBS_OF_SHOWING = _phrases(
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
    """One to five words, in title case or in capitals."""
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
    carrier, place, light = rng.choice(CARRIERS), rng.choice(PLACES), rng.choice(LIGHTS)
    showing, lettering = rng.choice(VERBS_OF_SHOWING), rng.choice(LETTERING)
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


def tiny_prompts(seed: int) -> tuple[list[str], list[str]]:
    train, test = split_words(seed)
    return [sign_prompt(word) for word in train], [sign_prompt(word) for word in test]


def full_prompts(seed: int) -> tuple[list[str], list[str]]:
    """No two prompts have the same quoted text, by the reading of the OCR reward."""
    rng = random.Random(seed)
    prompts: dict[str, str] = {}
    while len(prompts) < FULL_TRAIN + FULL_TEST:
        text = quoted_text(rng)
        prompts.setdefault(text.lower().replace(" ", ""), sentence(text, rng))
    # Short texts run out early: without this, the ends of the list would differ in length.
    lines = list(prompts.values())
    rng.shuffle(lines)
    return lines[:FULL_TRAIN], lines[FULL_TRAIN:]


SETS = {"tiny": ("dataset/ocr", tiny_prompts), "full": ("dataset/ocr_full", full_prompts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--out", type=Path, help="new folder; dataset/ocr or dataset/ocr_full")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    default, make = SETS[args.set]
    folder = args.out or Path(default)
    if folder.exists():
        parser.exit(2, f"{parser.prog}: error: {folder} already exists; remove it or use --out\n")
    folder.mkdir(parents=True)
    for name, prompts in zip(("train", "test"), make(args.seed), strict=True):
        path = folder / f"{name}.txt"
        path.write_text("\n".join(prompts) + "\n")
        print(f"wrote {len(prompts)} prompts to {path}")


if __name__ == "__main__":
    main()
