"""Grammars: JSON Schema, regular expressions and Lark, as llguidance compiles them."""
