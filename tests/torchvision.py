"""Lets torchvision, which timm, open_clip and others import, be imported beside any build of PyTorch.

Its compiled operations load beside the one build that they were made with. Without them its own module
that describes them to the compiler raises; no model here calls one.
"""

import sys
from types import ModuleType

sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
