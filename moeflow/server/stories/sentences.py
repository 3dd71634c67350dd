"""The sentences of stories. Names in braces are values. The page translates the sentences before it fills them in."""

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "received": "{share} of the time ({time}) passed before it was admitted: its body came, or its model was loaded.",
    "tokenized": "{share} of the time ({time}) made {count} tokens of the prompt's text, or compiled its grammar.",
    "queued": "{share} of the time ({time}) was spent in the queue for the running pass to end.",
    "queued behind one": "{share} of the time ({time}) was spent in the queue, behind one other sequence.",
    "queued behind more": "{share} of the time ({time}) was spent in the queue, behind {count} other sequences.",
    "waiting": "The engine has brought nothing for {time}: the request is in the queue, or its prompt is computed.",
    "prompt": "The prompt of {count} tokens took {time}; none of it was in the prefix cache.",
    "prompt with cached part": "The prompt of {count} tokens took {time}; {cached} of them were in the prefix cache.",
    "decode": "The {count} tokens of the answer took {time}, at {speed} tokens/s.",
    "decode with a long gap": "{count} tokens took {time}; one wait of {gap} came after token {before}.",
    "decode of one token": "The answer ended {time} after its first token.",
    "sent": "{share} of the time ({time}) passed after the last token, until the client had the answer.",
    "stalled": "Passes waited {time} for experts from disk.",
    "between passes": "{time} of it lay between its passes: the engine computed others, or waited for the processor.",
    "expected": "The plan expects {expected} tokens/s for one request alone: it had {share} of that.",
    "other programs": "Other programs had {share} of the processor meanwhile, which slows passes.",
    "shared passes": "Its passes computed {others} tokens of other requests, beside {own} of its own.",
}
NOT_OBSERVED: Final = {
    "not loaded": "the model is not loaded any more.",
    "no answer": "the engine does not answer.",
    "not watched": "its passes were not observed. Engines observe them while the inspector is open, and 60 s longer.",
    "partly watched": "a part of its passes was not observed, so the numbers are those of the rest.",
}
