"""What the judges are asked. `vlm_answers` reads the forms that are asked for here."""

from flow_grpo.rewards.vlm_answers import NO_TEXT

READ_QUESTION = f"""\
Which text is written in this picture? Copy it exactly as it is spelled there, mistakes included,
in reading order and on one line. Leave out what you cannot make out; do not guess. Answer with
the text alone. If the picture holds no legible text, answer {NO_TEXT}."""

GRADE_QUESTION = """\
An image generator was asked for:

{prompt}

Grade the picture it made, weighing two things equally. Fidelity: does it show everything that was
asked for, with the right number, colours, places and written words, and nothing that contradicts
it? Quality: is it sharp, well lit and well composed, without artefacts or broken shapes?

1 means useless, 2 poor, 3 fair, 4 good and 5 flawless; decimals such as 3.5 are welcome. Give your
reasons in one or two sentences, then end with a line of its own in this form:
Score: X"""

FINAL_QUESTION = """\
You see a generated picture. This is the caption it was made for:

{prompt}

Go through what the caption mentions (things, properties, relations, actions, words) and say
whether the picture shows it. Then look at the picture itself: is it clear, plausible and pleasant
to look at? Put both into one grade between 1 (very bad) and 5 (very good); decimals are allowed.
The last line of your answer must be the grade:
Final Score: X"""

AXES_QUESTION = """\
You see a generated picture. This is the caption it was made for:

{prompt}

Grade three things separately, each between 1 (very bad) and 5 (very good), decimals allowed:
alignment, how well the picture matches the caption; coherence, how free it is of distortions and
of things that make no sense; style, how appealing it is, whatever it shows. Answer with
these three lines and nothing else:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z"""

BETTER_QUESTION = """\
You see two pictures, picture 1 and then picture 2, that image generators made for this caption:

{prompt}

Which one is better? First weigh how well each shows what the caption asks for, with the right
things, number, colours, places and written words; where they are equal in that, which one is
sharper and has fewer broken shapes. Their order says nothing. Give your reasons in one or two
sentences, then end with a line of its own, with 1, 2 or tie for X:
Better: X"""
