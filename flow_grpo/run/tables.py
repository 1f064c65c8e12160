"""Tables that read well on a console and are Markdown as well."""


def table(rows: list[list[str]]) -> str:
    """The first row is the head; the first column is aligned to the left, all others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])
