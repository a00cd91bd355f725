PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Empty is off: tests start many processes, and to make the byte code of torch and transformers anew takes each of
# them ten seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test integrations fuzz against site lint benchmarks clean

quickstart: $(READY)
	$(BIN)/python examples/quickstart.py

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not integration"

integrations: .venv/.integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m integration

# Ten thousand models that are drawn, and a thousand in FP8: hours on two cores, `make fuzz MODELS=500` minutes.
MODELS ?= 10000
fuzz: $(READY)
	TE_TRANSFORM_FUZZ=$(MODELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/test_drawn.py

# What other versions change: `make against TORCH=2.11.0 TRANSFORMERS=5.0.0`, the newest of what is not named. Where
# there are a GPU and TE, python -m pytest tests/gpu tests/te_contract in there says it of them.
against:
	$(PYTHON) -m venv .venv-against
	.venv-against/bin/python -m pip install -q --no-compile torch$(TORCH:%===%)
	.venv-against/bin/python -m pip install -q --no-compile transformers$(TRANSFORMERS:%===%) -e '.[test]'
	.venv-against/bin/python -m pip list
	OMP_NUM_THREADS=1 .venv-against/bin/python -m pytest -n auto --dist loadgroup -m "not integration"

# the pages of docs/, as a site in site/
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

benchmarks: $(READY)
	$(BIN)/python benchmarks/convert_speed.py

clean:
	rm -rf .venv .venv-against build dist site *.egg-info

# torch comes first and alone: the build that the package index in use offers is the one that everything else
# then finds installed, so that no extra pulls in another. Without byte code, which is made of all modules
# there and in transformers, and half of the installation's time: Python makes it of those that are imported.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[test]'
	touch $@

# packages with models that want torchvision or an old huggingface-hub, see tests/others.py
OTHERS := torchvision==0.28.0 timm open_clip_torch ftfy wcwidth vit-pytorch segment-anything litgpt==0.5.13 jsonargparse
.venv/.integrations: $(READY)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[integrations]'
	$(BIN)/python -m pip install -q --no-compile --no-deps --target .venv/others $(OTHERS)
	touch $@
