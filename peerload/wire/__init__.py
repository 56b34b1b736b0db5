"""Bytes to messages and back: versioned, bounded, total."""
