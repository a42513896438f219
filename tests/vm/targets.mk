# Deploys to a machine, which is a systemd container or, with -full, an emulated one.

.PHONY: test-vm test-vm-full test-runbooks test-runbooks-all

TEST_MACHINE = cd tests && $(CURDIR)/$(PY) -m

test-vm: $(VENV)/.installed-dev ## deploy to a machine in a container (installs and starts the engine on Debian, as root)
	$(TEST_MACHINE) vm.image
	$(PY) -m pytest tests/vm

test-vm-full: $(VENV)/.installed-dev ## deploy to an emulated machine with a kernel of its own; takes an hour
	$(TEST_MACHINE) vm.image
	$(TEST_MACHINE) vm.full
	$(PY) -m pytest tests/vm/test_deploy.py --machine full -m emulated

test-runbooks: $(VENV)/.installed-dev ## a few runbooks, run as they are printed on a machine with the fault
	$(TEST_MACHINE) vm.image
	$(PY) -m pytest tests/vm/test_runbooks.py -m "not slow"

test-runbooks-all: $(VENV)/.installed-dev ## all of them, and their times into the index; takes most of an hour
	$(TEST_MACHINE) vm.image
	$(PY) -m pytest tests/vm/test_runbooks.py --write-times
