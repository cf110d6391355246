# Every target makes .venv if it is missing; nothing else needs to be set up.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Where it is set, each of the tests' many processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo pipeline bands test test-random test-browser test-notebooks notebooks test-gguf test-harness test-trl test-places test-memory test-arrangements test-ranks test-slurm test-job-files test-kills test-tries test-crashes test-schema test-overload test-engine test-planted test-fake-cuda test-cuda test-guide test-processors test-sanitizers test-margins wheel lint format reference docs bench first-hour experiments league clean

help:
	@echo "make demo    train a small model on Python's own sources and talk to it (about 6 minutes on 2 cores, installation included)"
	@echo "make pipeline  from text to an assistant: a small base model, instruction tuning, DPO, held-out questions (about 10 minutes)"
	@echo "make test    run the tests, the same at every run (about 8 minutes on 2 cores)"
	@echo "make test-random  run the tests in a random order with drawn examples; SEED=N repeats, MINUTES=60 repeats with other seeds"
	@echo "make test-margins  tests that a run learns, with ten seeds in two precisions (about 15 minutes on 2 cores)"
	@echo "make test-processors  run the numeric tests as other processors would compute them (about 4 minutes each on 2 cores)"
	@echo "make test-sanitizers  run the C++ under sanitizers for memory, undefined behavior and threads, and compile it with -Werror"
	@echo "make test-fake-cuda  every kind of step, generation and evaluation on fake CUDA tensors, and planted faults (about 5 minutes on 2 cores)"
	@echo "make test-cuda     training, generation and runs on a CUDA GPU, next to the CPU (about 2 minutes)"
	@echo "make test-gguf  compare GGUF files with llama.cpp (built from source at first, about 15 minutes on 2 cores)"
	@echo "make test-harness  compare lm-evaluation-harness's scores of a run and of its export (about a minute on 2 cores)"
	@echo "make test-trl  compare preference tuning with trl, which it installs (about a minute)"
	@echo "make test-places  runs in servers with the interfaces of S3, which fails, Google's and Azure's stores; it installs them (needs npm; about 4 minutes on 2 cores)"
	@echo "make test-memory  hold planned memory against traced steps, of every preset and of 1,500 drawn models (about 25 minutes on 2 cores)"
	@echo "make test-arrangements  500 drawn recipes, twice: what is planned and advised, training accepts; what a step is planned to hold, its trace and processes hold (about 6 minutes on 2 cores)"
	@echo "make test-slurm  jobs of gptworks launch in a Slurm of this machine, preempted and requeued (about 5 minutes; needs slurm-wlm and root)"
	@echo "make test-job-files  job files in SkyPilot's parser and Kubeflow's models, which it installs (about 2 minutes)"
	@echo "make test-tries  ten tries of a change that does nothing, with real runs (about 8 minutes on 2 cores)"
	@echo "make test-kills  kill runs of 1, 2 and 4 ranks fifty times on disk and as often in a failing S3 server (with moto, which it installs), and a build twenty times, and resume them; KILLS=100 SEED=1 draws others (about 30 minutes on 2 cores)"
	@echo "make test-crashes  every state that a crash or a failing disk can leave (takes long; needs strace)"
	@echo "make test-schema  5,000 requests to the server, made from its schema (about 10 minutes on 2 cores)"
	@echo "make test-overload  the server with too many clients, slow ones, and ones that leave (about 3 minutes on 2 cores)"
	@echo "make test-engine  the engine in 5,000 random events against a loop without a cache (about 2 minutes)"
	@echo "make test-planted  filters on thousands of planted duplicates and broken texts, and on hostile texts of 16 MiB (takes long)"
	@echo "make test-guide  the commands of the README and the guide, in order, in an empty folder (about 10 minutes on 2 cores)"
	@echo "make test-notebooks  the notebooks of docs/, by a kernel, in an empty folder (about 2 minutes on 2 cores); make notebooks keeps the outputs"
	@echo "make test-browser  the studio's page in a browser (needs chromium and npm; about 5 minutes on 2 cores)"
	@echo "make wheel   a wheel in dist/ with the C++ built for this kind of processor, tried without a compiler (about 2 minutes on 2 cores)"
	@echo "make lint    formatters and linters of Python, C++ and JavaScript, mypy and the import contract"
	@echo "make reference  writes docs/reference/ from the settings and the commands"
	@echo "make docs    the documents as a site in site/; a broken link is an error (about a minute)"
	@echo "make bands   train the short recipes with three seeds each, for gptworks compare (about half an hour on 2 cores)"
	@echo "make first-hour  init, train and tune on four folders of texts, beside the old defaults, nanoGPT's recipe and xz (over two hours)"
	@echo "make experiments  changes beside the defaults, by regime and seed, for docs/experiments.md (goes on where it was; many hours)"
	@echo "make league  the recipes of bench/league/5-minutes/, five minutes of two cores each, for docs/league.md (about half an hour)"
	@echo "make bench   speed beside textbook loops, torch's own passes, other engines, servers and data pipelines; memory beside what was planned"

demo: .venv/.installed
	$(BIN)/gptworks train demo --resume
	@echo; echo "Held-out files, chosen before training by the rule below, and how the model continues them:"
	$(BIN)/gptworks generate runs/demo --held-out 3 --max-tokens 80 --seed 1
	@echo; echo "Held-out text, and what compressors make of it:"
	$(BIN)/gptworks evaluate runs/demo --compressors
	@echo; echo "Go on with: $(BIN)/gptworks chat runs/demo"
	@echo "The model in one file, for a friend: $(BIN)/gptworks export runs/demo demo.html --format html"

pipeline: .venv/.installed
	$(BIN)/python bench/pipeline.py
	@echo; echo "Go on with: $(BIN)/gptworks chat runs/miniature-preference"

test: .venv/.installed-dev
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist worksteal

test-random: .venv/.installed-dev
	$(BIN)/python tests/draw.py $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

# Without GGML_NATIVE: llama.cpp's AMX code ends with a fault where a virtual machine shows AMX and does not grant it.
test-gguf: .venv/.installed-dev
	CMAKE_ARGS="-DGGML_NATIVE=OFF" $(PIP) -e ".[peers]"
	$(BIN)/python -m pytest -m llama_cpp tests/test_gguf.py

test-harness: .venv/.installed-dev
	$(PIP) -e ".[harness]"
	$(BIN)/python -m pytest -m harness tests/test_lm_eval.py tests/test_serve_lm_eval.py

test-trl: .venv/.installed-dev
	$(PIP) -e ".[data,peers-trl]"
	$(BIN)/python -m pytest -m trl tests/test_preference.py

AZURITE := .venv/azurite/node_modules/.bin/azurite-blob
test-places: .venv/.installed-dev
	$(PIP) -e ".[places]"
	test -x $(AZURITE) || npm install --silent --prefix .venv/azurite azurite@3.35.0
	GPTWORKS_AZURITE=$(abspath $(AZURITE)) $(BIN)/python -m pytest -m places -rsP tests/test_remote_s3.py

test-memory: .venv/.installed-dev
	$(BIN)/python -m pytest -m grid tests/test_memory.py tests/test_memory_of_combinations.py tests/test_costs.py

test-arrangements: .venv/.installed-dev
	$(BIN)/python -m pytest -m arrangements -rP tests/test_arrangements.py tests/test_plan_claims.py

test-ranks: .venv/.installed-dev
	$(BIN)/python -m pytest -m ranks tests/test_parallel.py tests/test_ranks.py tests/test_machines.py tests/test_memory_of_ranks.py tests/test_network.py tests/test_host.py tests/test_scaling.py

test-slurm: .venv/.installed-dev
	$(BIN)/python -m pytest -m slurm -rs tests/test_slurm.py

SCHEDULERS := .venv/schedulers
test-job-files: .venv/.installed-dev
	test -d $(SCHEDULERS) || { $(PYTHON) -m venv $(SCHEDULERS) && \
	  $(SCHEDULERS)/bin/pip install --quiet skypilot==0.14.1 kubeflow-trainer-api==2.3.0; }
	GPTWORKS_SCHEDULERS=$(SCHEDULERS) $(BIN)/python -m pytest -m job_files tests/test_job_files.py

test-margins: .venv/.installed-dev
	for seed in 0 1 2 3 4 5 6 7 8 9; do for precision in fp32 bf16; do \
	  GPTWORKS_TEST_SEED=$$seed GPTWORKS_TEST_PRECISION=$$precision $(BIN)/python -m pytest -m learning -n 2 --dist worksteal || exit 1; \
	done; done

test-kills: .venv/.installed-dev
	$(PIP) -e ".[places]"
	$(if $(KILLS),GPTWORKS_KILLS=$(KILLS)) $(if $(SEED),GPTWORKS_KILLS_SEED=$(SEED)) \
	  $(BIN)/python -m pytest -m kills -rP tests/test_kills.py tests/test_build_kills.py

test-tries: .venv/.installed-dev
	$(BIN)/python -m pytest -m tries -rP tests/test_try.py tests/test_judge_tools.py

test-crashes: .venv/.installed-dev
	$(BIN)/python -m pytest -m "crashes or not crashes" -rP tests/test_crash_consistency.py

test-schema: .venv/.installed-dev
	$(BIN)/python -m pytest -m schemathesis -rP tests/test_serve_schema.py

test-overload: .venv/.installed-dev
	$(BIN)/python -m pytest -m overload -rP tests/test_serve_overload.py

# PROCESSORS="haswell": those alone. The kernels for AArch64 need Debian's g++-aarch64-linux-gnu and qemu-user.
test-processors: .venv/.installed-dev
	$(BIN)/python -m pytest -m processors -rs tests/test_native_processors.py tests/test_native_library.py
	$(BIN)/python tests/as_processors.py $(PROCESSORS)

test-sanitizers: .venv/.installed-dev
	$(BIN)/python -m pytest -m sanitizers -rs tests/test_sanitizers.py

test-engine: .venv/.installed-dev
	GPTWORKS_MACHINE_STEPS=5000 $(BIN)/python -m pytest -m engine_machine -rP tests/test_engine_machine.py

test-planted: .venv/.installed-dev
	$(BIN)/python -m pytest -m planted -rP tests/test_cleaning.py tests/test_planted.py

test-cuda: .venv/.installed-dev
	$(BIN)/python -m pytest -m cuda -rs

# Needs Linux, a C++ compiler and a CPU build of torch; nothing runs on a GPU.
test-fake-cuda: .venv/.installed-dev
	$(BIN)/python -m pytest -m fake_cuda -rs tests/test_fake_cuda.py

test-guide: .venv/.installed-dev
	$(BIN)/python -m pytest -m guide -rP tests/test_guide.py

test-notebooks: .venv/.installed-dev
	$(BIN)/python -m pytest -m notebooks -rP tests/test_notebooks.py

# The accessibility rules, axe-core, come from npm. GPTWORKS_SCREENSHOTS=folder keeps pictures of the page.
AXE := .venv/axe-core-4.14.1
test-browser: .venv/.installed-dev $(AXE)/axe.min.js
	GPTWORKS_AXE=$(AXE)/axe.min.js $(BIN)/python -m pytest -m browser -rPs tests/test_browser_*.py

$(AXE)/axe.min.js: | .venv/bin/python
	cd .venv && npm pack --silent axe-core@4.14.1 >/dev/null
	mkdir -p $(AXE) && tar -xzf $(AXE).tgz -C $(AXE) --strip-components 1

notebooks: .venv/.installed-dev
	GPTWORKS_KEEP_NOTEBOOKS=1 $(BIN)/python -m pytest -m notebooks tests/test_notebooks.py

# cibuildwheel builds those for release; see pyproject.toml.
wheel: .venv/.installed-dev
	rm -rf dist
	GPTWORKS_BUILD_NATIVE=1 $(BIN)/python -m build --wheel
	$(BIN)/python -m pytest -m wheel -rs tests/test_wheel.py

PAGE := src/gptworks/studio/static
FILE := src/gptworks/interop/html_file
# From npm at its first use.
PRETTIER := $(BIN)/deno run --quiet --allow-read --allow-write --allow-env --allow-sys npm:prettier@3.10.1 --log-level warn
CXX_FILES := $(wildcard src/gptworks/*/*.cpp src/gptworks/*/*.h tests/*.cpp)
WASM_FILES := $(wildcard src/gptworks/kernels/wasm/*.cpp src/gptworks/kernels/wasm/*.h)
lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES) $(WASM_FILES)
	$(BIN)/clang-tidy --quiet $(filter src/%.cpp,$(CXX_FILES)) -- -std=c++17 -O1
	$(BIN)/deno lint --quiet $(PAGE)/js $(FILE)/js/*js $(FILE)/js/explain
	$(PRETTIER) --check $(PAGE)/js '$(PAGE)/*.css' '$(FILE)/js/*js' $(FILE)/js/explain '$(FILE)/*.css'
	! grep -rnE '.{121,}' $(PAGE)/js $(PAGE)/*.css $(FILE)/js/*js $(FILE)/js/explain

format: .venv/.installed-dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES) $(WASM_FILES)
	$(PRETTIER) --write $(PAGE)/js '$(PAGE)/*.css' '$(FILE)/js/*js' $(FILE)/js/explain '$(FILE)/*.css'

reference: .venv/.installed-dev
	$(BIN)/python docs/generate_reference.py

docs: .venv/.installed-dev
	$(PIP) -e ".[docs]"
	$(BIN)/zensical build --strict --clean

bench: .venv/.installed-dev
	$(PIP) -e ".[bench,serve,data,clean]"
	$(BIN)/python bench/cleaning.py
	$(BIN)/python bench/train.py
	$(BIN)/python bench/passes.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/memory_of_ranks.py
	$(BIN)/python bench/saving.py
	$(BIN)/python bench/infer.py
	$(BIN)/python bench/serve.py
	$(BIN)/python bench/data.py --megabytes 500

# A short look: FIRST_HOUR="--folder english --minutes 1".
first-hour: .venv/.installed
	$(BIN)/python bench/first_hour.py $(FIRST_HOUR)

# Without a network: EXPERIMENTS="--shakespeare tinyshakespeare.txt"
experiments: .venv/.installed
	$(BIN)/python bench/experiments.py $(EXPERIMENTS)

# Without a network: LEAGUE="--text tinyshakespeare.txt". An entry again: LEAGUE="--replay small"
league: .venv/.installed
	$(BIN)/python bench/league.py $(LEAGUE)

# Without a network: BAND_SETTINGS="data.sources.0.path=tinyshakespeare.txt" BANDS=shakespeare-char
BANDS ?= demo shakespeare-char shakespeare-deep
bands: .venv/.installed
	mkdir -p src/gptworks/runs/bands
	set -e; for recipe in $(BANDS); do \
	  for seed in 1 2 3; do \
	    $(BIN)/gptworks train $$recipe $(BAND_SETTINGS) seed=$$seed run_dir=runs/bands/$$recipe-$$seed --resume; \
	  done; \
	  $(BIN)/gptworks compare runs/bands/$$recipe-1 runs/bands/$$recipe-2 runs/bands/$$recipe-3 \
	    --make-band src/gptworks/runs/bands/$$recipe.json; \
	done

clean:
	rm -rf .venv build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gptworks needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e "."
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[data,dev]"
	@touch $@ .venv/.installed
