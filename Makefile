PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Write byte code (empty is off). Tests start many processes, and without byte code each needs ten seconds more to
# import torch and transformers.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test integrations fuzz against site lint benchmarks clean

quickstart: $(READY)
	$(BIN)/python examples/quickstart.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not integration"

integrations: .venv/.integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m integration

# Draw and convert ten thousand models, a thousand of them in FP8: hours on two cores. `MODELS=500` takes minutes.
MODELS ?= 10000
fuzz: $(READY)
	TE_TRANSFORM_FUZZ=$(MODELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/test_drawn.py

# Run the tests with other versions: `make against TORCH=2.11.0 TRANSFORMERS=5.0.0`, the newest of each that is not
# named. With a GPU and TE, run also: .venv-against/bin/python -m pytest tests/gpu tests/te_contract
against:
	$(PYTHON) -m venv .venv-against
	.venv-against/bin/python -m pip install -q --no-compile torch$(TORCH:%===%)
	.venv-against/bin/python -m pip install -q --no-compile transformers$(TRANSFORMERS:%===%) -e '.[test]'
	.venv-against/bin/python -m pip list
	OMP_NUM_THREADS=1 .venv-against/bin/python -m pytest -n auto --dist loadgroup -m "not integration"

# Build the pages of docs/ into site/.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

benchmarks: $(READY)
	$(BIN)/python benchmarks/convert_speed.py

clean:
	rm -rf .venv .venv-against build dist site *.egg-info

# Install torch first and alone, so that no extra pulls in another build of it. Do not compile byte code, which takes
# half of the installation's time: Python compiles the modules that are imported.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[test]'
	touch $@

# Packages with models that need torchvision or an old huggingface-hub, see tests/others.py.
OTHERS := torchvision==0.28.0 timm open_clip_torch ftfy wcwidth vit-pytorch segment-anything litgpt==0.5.13 jsonargparse
.venv/.integrations: $(READY)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[integrations]'
	$(BIN)/python -m pip install -q --no-compile --no-deps --target .venv/others $(OTHERS)
	touch $@
