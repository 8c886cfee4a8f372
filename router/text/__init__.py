"""Text on both sides of the model: prompt to token ids, token ids to text.

`tokenizer` loads a directory's tokenizer.json, `chat` renders its chat template, `detokenizer` turns tokens into
text as they come, `stops` finds stop strings in that text, `model` holds all of them for the served model.
Never imports torch or transformers.
"""
