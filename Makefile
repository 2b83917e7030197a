# Needs `pip install -e '.[dev]'`; `make ci` needs only python3.
PYTHON ?= python
# of one GPU, without weights or another checkout; and those that are started by hand
DIRECT = attention decode clock generation
BY_HAND = distillation distributed learning pretrained recall

.PHONY: check test gpu fuzz sanitize bench docs site ci

check:  ## lint, format, types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:  ## what runs anywhere; tests marked gpu skip themselves without one
	$(PYTHON) -m pytest

gpu:  ## the GPU-marked tests and the kernels', then the benchmarks' quick forms; fails where there is no GPU
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu: torch sees no CUDA device")'
	$(PYTHON) -m pytest tests -m gpu
	$(PYTHON) -m pytest tests -m "kernels and not gpu"
	set -e; for name in $(DIRECT) distillation learning; do $(PYTHON) -m benchmarks.$$name --quick; done

fuzz:  ## calls beyond every tile, drawn for 300 s, against the specification
	$(PYTHON) tests/scripts/fuzz.py --seconds 300

sanitize:  ## every kernel under compute-sanitizer: no read or write out of bounds; compiled first
	$(PYTHON) tests/scripts/sanitize.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all \
		--error-exitcode 1 $(PYTHON) tests/scripts/sanitize.py --jobs 0

bench:  ## benchmarks of one GPU; rows are appended to benchmarks/results/
	set -e; for name in $(DIRECT); do $(PYTHON) -m benchmarks.$$name; done

docs:  ## redraw pictures from the library's own geometry, tables from the rows
	$(PYTHON) docs/draw_masks.py
	$(PYTHON) docs/draw_gallery.py
	set -e; for name in $(DIRECT) $(BY_HAND); do $(PYTHON) -m benchmarks.$$name --table; done

site:  ## the documentation as pages under site/; needs docs/requirements.txt
	$(PYTHON) -m mkdocs build --strict

ci:  ## the whole gate, in environments of its own
	.ci/run
