"""How models write tool calls and reasoning: readers of their text, and grammars for it."""
