"""The commands, thin over the library, and what they print."""
