"""One training step without any framework: seeds, residuals, frames, topologies over a transport, policies, the trial and the stats."""
