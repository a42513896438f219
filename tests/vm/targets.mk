# Deploys to a machine, which is a systemd container or, with -full, an emulated one.

.PHONY: test-vm test-vm-full

TEST_MACHINE = cd tests && $(CURDIR)/$(PY) -m

test-vm: $(VENV)/.installed-dev ## deploy to a machine in a container (installs and starts the engine on Debian, as root)
	$(TEST_MACHINE) vm.image
	$(PY) -m pytest tests/vm

test-vm-full: $(VENV)/.installed-dev ## the same on an emulated machine with a kernel of its own; takes long
	$(TEST_MACHINE) vm.image
	$(TEST_MACHINE) vm.full
	$(PY) -m pytest tests/vm --machine full
