"""Plot the curves of docs/metrics.md: each metric for a healthy and an unhealthy run.

python scripts/health_figures.py
"""

from pathlib import Path

from plot import figure_writer, read_curve

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
RUNS = {path.stem: path for path in RESULTS.glob("health/*.jsonl")}
RUNS |= {f"dpo-{seed}": RESULTS / f"methods_h200/tiny_dpo-{seed}.jsonl" for seed in (1, 3)}
FIGURES = {  # metric, healthy run, unhealthy run
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
    """Write a figure of up to six panels, each (metric, healthy run, unhealthy run)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(9, 4.2))
    for axes, (metric, *runs) in zip(grid.flat, panels, strict=True):
        for run, colour in zip(runs, ("tab:green", "tab:red"), strict=True):
            axes.plot(*read_curve(RUNS[run], metric), color=colour, label=run)
        axes.set_title(metric, fontsize="medium")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    with figure_writer(out):
        figure.savefig(out, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    for name, panels in FIGURES.items():
        draw(panels, ROOT / f"docs/images/health/{name}.png")
