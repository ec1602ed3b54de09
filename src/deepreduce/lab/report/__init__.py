"""One self-contained HTML page for a benchmark or a training run: tables and plots, no network needed."""
