"""A new vision-language checkpoint out of a vision tower and a language model; see docs/how-to/compose.md."""
