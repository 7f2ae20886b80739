"""How `probe` finds out what a server can do: few, small questions, and judgements that expect any answer."""
