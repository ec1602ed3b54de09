"""What measures: training runs, benchmarks, reports and recorded gradients. The core never imports it."""
