"""One HTML file that shows a run, or several side by side: docs/report.md."""
