"""Value codecs: floats to bytes and back. One method per file."""
