"""English words of three to six letters for signs, and their train and test split."""

import random

TEST_WORDS = 96

# All are read correctly on clean signs; OIL and ZOO are not: PP-OCR reads their O as a zero.
WORDS = """
ace act ant arm art ash axe bag bar bat bay bed bee box bus cab cap car cat cow cup day den dog
ear egg elm fan fig fin fir fox fun gas gem gym hat hay hen hut ice ink inn jam jar jet joy key
kit law leg lid log map mat mud net nut oak oar owl pan paw pea pen pie pig pin pot pub ram
rug sea sky sun tea toy van web
acid aqua arch atom bake bank barn bath bean bear bell belt bike bird boat bold bone book boot
bowl brew bulb cafe cake calm camp card cave chef city clay club coal coat coin cold cook cool
corn crab crew crow cube dark dawn deck deer desk dish dock door dove drum duck dune dust east
echo exit farm fern film fire fish flag foam fork fort frog fuel game gate gift goat gold golf
gulf half hall harp hawk herb hero hill home hope horn iron isle jazz june jump keep kiwi knot
lace lake lamb lamp land leaf lime lion loft lost love luck lynx maze menu milk mint moon moss
navy nest news noon nova oath onyx opal open oven park path peak pear pine pipe plum pond pony
pool port quiz rain reef rice ring road rock roof rose ruby sail salt sand seed ship shoe shop
silk slow snow soap song soup star stop surf swan tent tide tile town toys tree tuna vase vine
walk wave west wild wind wine wing wolf wood wool yard yoga zinc zone
actor agate alarm album amber angel apple arena attic bacon badge baker basil beach berry birch
blaze bloom board brave bread brick brook brush cabin candy canoe cargo cedar chair chalk charm
chess chief cider clock cloud coast cobra cocoa coral crane cream crown curry daisy dance depot
diner dream eagle earth ember fable ferry field flame fleet flour forge frost fruit giant glass
globe glove grape grass green guest guide habit happy haven hazel heart honey horse hotel house
ivory jelly jewel juice knife koala label laser lemon light lilac lotus lucky lunch magic mango
maple march medal melon metal model money motel motor mouse movie music night north novel ocean
olive onion opera orbit otter oxide paint panda paper party pasta patio peach pearl penny petal
phone photo piano pilot pizza plane plant plaza poker polar porch press prism quart queen quick
quilt radio ranch raven rapid river robin robot royal salad salon sauce scout shade shark sheep
shelf shell shore skate skill slate smile smoke snack solar south space spark spice spoon sport
spray squad stage steam steel stone storm store studs sugar sunny swift sword syrup table tiger
toast topaz torch tower track trail train tulip union urban vault video vinyl viola vivid wagon
waltz watch water whale wheat wheel white world yacht young zebra
acorns anchor autumn bakery bamboo banana barber basket beacon bishop bottle branch breeze bridge
bronze bucket butter cactus camera candle canyon carpet carrot castle cellar cherry church cinema
circus cobalt coffee copper corner cotton cradle cruise dental desert dinner doctor dollar donkey
dragon empire engine falcon family farmer flower forest galaxy garage garden ginger glider golden
grotto guitar hammer harbor hiking hockey hunter indigo island jacket jaguar jigsaw jungle kettle
kitten ladder lagoon laurel legend lizard magnet marble market meadow mellow mirror monkey muffin
museum nectar needle nickel nutmeg office orange orchid oxygen oyster palace parade parcel parrot
pastry pebble pepper pickle pigeon pillow planet plasma pocket police potato prince puzzle rabbit
racket reason record ribbon rocket saddle safari salmon school shadow shield silver singer sketch
spirit spring square stable studio summer sunset tailor tavern temple tennis theory thread ticket
timber tomato travel tunnel turtle valley vanity velvet violet voyage walnut willow window winter
wizard yellow yogurt zipper
"""


def all_words() -> list[str]:
    return [word.upper() for word in WORDS.split()]


def split_words(seed: int = 0) -> tuple[list[str], list[str]]:
    """Return train and test words, disjoint and in alphabetical order."""
    words = sorted(all_words())
    random.Random(seed).shuffle(words)
    return sorted(words[TEST_WORDS:]), sorted(words[:TEST_WORDS])
