"""Index codecs: positions to bytes and back. One method per file."""
