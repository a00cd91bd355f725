"""Settings of a process that captures many small models. No test depends on what they turn off."""

from __future__ import annotations

import gc
import logging

import torch._dynamo.config
import torch._dynamo.guards
import torch._dynamo.utils
import transformers  # noqa: F401  frozen below

# A capture makes objects by the hundred thousand, and dynamo keeps many of them. Without freeze(), the
# garbage collector would scan all of them, and all of PyTorch, again and again.
# Without dynamo's own collection, garbage of a capture holds the outputs of the captured call.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 20, 1_000_000)
torch._dynamo.config.run_gc_after_compile = False

# Logs take half of the time of a small capture: dynamo times its guards after it has emptied the CPU's
# caches, and formats all settings of the compiler.
logging.getLogger("torch.__trace").handlers.clear()
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
torch._dynamo.utils._get_dynamo_config_for_logging = lambda: None
torch._dynamo.utils._scrubbed_inductor_config_for_logging = lambda: None
