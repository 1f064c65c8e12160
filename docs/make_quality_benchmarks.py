"""Write the tables of docs/quality_benchmarks.md from flow_grpo/benchmarks/protocols.toml.

python docs/make_quality_benchmarks.py
"""

import re
from pathlib import Path

from flow_grpo.benchmarks.protocol import (
    ImageSampling,
    Protocol,
    benchmark_names,
    get_protocol,
    scorer_infos,
)
from flow_grpo.report.console import markdown_table

PAGE = Path(__file__).with_name("quality_benchmarks.md")
PLACE = re.compile(r"(<!-- protocols (\w+) -->\n).*?(?=<!-- end -->)", re.S)


def table(kind: str) -> str:
    """Return a table: "diffusion" or "vlm" protocols, "prompts" or "scorers"."""
    protocols = [get_protocol(name) for name in benchmark_names()]
    if kind == "scorers":
        return markdown_table(_scorer_rows())
    if kind == "prompts":
        return markdown_table(_prompt_rows(protocols))
    head = ["benchmark", "prompts", "samples", "sampling", "scorers", "score", "from"]
    rows = [_protocol_row(each) for each in protocols if each.trainer == kind]
    return markdown_table([head, *rows])


def _protocol_row(protocol: Protocol) -> list[str]:
    source = protocol.prompts
    missing = protocol.missing_scorers()
    scorers = [
        f"`{name}`" + (" (not available)" if name in missing else "") for name in protocol.scorers
    ]
    return [
        f"`{protocol.name}`: {protocol.title}",
        str(source.count),
        str(protocol.samples),
        "; ".join(_sampling(family, protocol) for family in protocol.sampling),
        ", ".join(scorers),
        protocol.formula.replace("_", " "),
        protocol.settings_from,
    ]


def _sampling(family: str, protocol: Protocol) -> str:
    found = protocol.sampling[family]
    if isinstance(found, ImageSampling):
        text = f"{found.steps} steps, guidance {found.guidance:g}, {found.width} x {found.height}"
    else:
        how = f"temperature {found.temperature:g}" if found.temperature else "greedy"
        text = f"{how}, {found.max_new_tokens} tokens"
    return text if family == "default" else f"`{family}`: {text}"


def _prompt_rows(protocols: list[Protocol]) -> list[list[str]]:
    rows = [["benchmark", "source", "file", "revision", "SHA-256", "licence"]]
    for each in protocols:
        source = each.prompts
        name = source.repository or "this project"
        kind = source.source.partition(" ")[0]
        link = {
            "github": f"[{name}](https://github.com/{name})",
            "hub": f"[{name}](https://huggingface.co/datasets/{name})",
        }.get(kind, name)
        checksum = f"`{source.sha256[:12]}`" if source.sha256 else "not pinned"
        commit = f"`{source.commit[:8]}`" if source.commit else "-"
        rows.append([f"`{each.name}`", link, f"`{source.files}`", commit, checksum, source.license])
    return rows


def _scorer_rows() -> list[list[str]]:
    rows = [["scorer", "weights", "published", "available"]]
    for name, info in scorer_infos().items():
        state = f"no: {info.missing}" if info.missing else "yes"
        rows.append([f"`{name}`", info.weights, info.paper, state])
    return rows


def page(text: str) -> str:
    """Return the page with all tables written again."""
    return PLACE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
