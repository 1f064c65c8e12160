"""Draw the curves of docs/metrics.md: each of a healthy run and of an ill one.

python scripts/health_figures.py
"""

from pathlib import Path

from plot import read_curve, writing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
RUNS = {path.stem: path for path in RESULTS.glob("health/*.jsonl")}
RUNS |= {f"dpo-{seed}": RESULTS / f"methods_h200/tiny_dpo-{seed}.jsonl" for seed in (1, 3)}
FIGURES = {  # metric, healthy, ill
    "steps": [
        ("train/ratio_mean", "healthy", "wide_clip"),
        ("train/grad_norm", "healthy", "wide_clip"),
        ("train/velocity_norm", "healthy", "wide_clip"),
        ("train/clip_low", "healthy", "narrow_clip"),
        ("train/clip_high", "healthy", "narrow_clip"),
        ("train/kl", "dpo-1", "dpo-3"),
    ],
    "rewards": [
        ("reward/avg", "healthy", "white"),
        ("reward/diversity", "healthy", "white"),
        ("reward/failed", "healthy", "wide_clip"),
        ("reward/zero_std_ratio", "healthy", "constant"),
        ("reward/std_within_group", "healthy", "constant"),
        ("reward/ocr", "healthy", "wide_clip"),
    ],
}


def draw(panels: list[tuple[str, str, str]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, grid = plt.subplots(2, 3, figsize=(9, 4.2))
    for axes, (metric, *runs) in zip(grid.flat, panels, strict=True):
        for run, colour in zip(runs, ("tab:green", "tab:red"), strict=True):
            axes.plot(*read_curve(RUNS[run], metric), color=colour, label=run)
        axes.set_title(metric, fontsize="medium")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    drawn.tight_layout()
    with writing(out):
        drawn.savefig(out, dpi=80)
    plt.close(drawn)


if __name__ == "__main__":
    for name, panels in FIGURES.items():
        draw(panels, ROOT / f"docs/images/health/{name}.png")
