"""A new vision-language checkpoint out of a vision tower and a language model; see docs/compose.md."""
