# Targets:  all  test  check  check-long  check-sanitize  check-threads  check-valgrind  reproduce  regimes  setup  format  clean
# A build variant is a folder and extra flags: make BUILD=build/mine EXTRA=-DMINE. `make test TESTS=test_model` runs one test.
# `make regimes REGIMES="--set sweep.seq_len=[4096]"` passes options on.

PACKAGES := gcc make libcjson-dev libopenblas-dev libcmocka-dev libglpk-dev openmpi-bin libopenmpi-dev python3-matplotlib valgrind
# Tests that are built in both precisions; tests/test_*_double.c are built in float64 alone.
DOUBLE_TESTS := test_layers test_reference test_state_mpi test_executor_mpi test_checkpoint_mpi

CC       = gcc
BUILD    = build
EXTRA    =
OPT      = -O2
# Simulator code must give the same bytes on every machine, so only training may use what this processor offers.
TRAIN_OPT = -O3 -march=native
# System headers, so that -Werror stays about our own code. Empty without Open MPI.
MPI_CFLAGS := $(patsubst -I%,-isystem %,$(shell mpicc --showme:compile 2>/dev/null))
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null)
CFLAGS   = -std=gnu11 $(OPT) -g -Wall -Wextra -Werror -ffp-contract=off
CPPFLAGS = -MMD -MP -Icore -I. $(MPI_CFLAGS)
LDLIBS   = -Wl,--as-needed -lcjson -lglpk -lopenblas $(MPI_LIBS) -lpthread -lm
# Instrumented code draws false warnings from gcc; the plain build has the true ones.
SANITIZE = BUILD=build/sanitize EXTRA='-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -Wno-error'
THREADS  = BUILD=build/threads EXTRA='-fsanitize=thread -fno-omit-frame-pointer -Wno-error'
# Valgrind knows fewer instructions than a new processor has.
VALGRIND = BUILD=build/valgrind TRAIN_OPT=-O2

SOURCES := $(wildcard core/*/*.c core/*/*/*.c baselines/*.c)
MAIN    := $(wildcard core/cli/main.c)
TRAIN   := $(filter core/layers/% core/state/% core/train/% core/profile/%,$(SOURCES))
# float32 or float64 is chosen when these are compiled, so they exist twice.
TWICE   := $(TRAIN) $(filter core/cli/%,$(SOURCES))
OBJECTS := $(SOURCES:%.c=$(BUILD)/%.o)
OBJECTS_DOUBLE := $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(TWICE),$(SOURCES))) $(TWICE:%.c=$(BUILD)/double/%.o)
BINARIES := $(if $(MAIN),$(BUILD)/disagmoe $(if $(TRAIN),$(BUILD)/disagmoe-double))

# The programs of a build folder, and the scripts, for which $(BUILD)/disagmoe is tested.
TESTS   := $(sort $(basename $(notdir $(wildcard tests/test_*.c tests/test_*.sh))))
NAMES   := $(filter $(TESTS),$(basename $(notdir $(wildcard tests/test_*.c))))
SCRIPTS := $(filter $(TESTS:%=tests/%.sh),$(wildcard tests/test_*.sh))
single   = $(patsubst %,$(1)/tests/%,$(filter-out %_double,$(NAMES)))
double   = $(patsubst %,$(1)/double/tests/%,$(filter %_double $(DOUBLE_TESTS),$(NAMES)))
programs = $(call single,$(1)) $(call double,$(1))

# All cores; makes started by this one share them.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif
MAKEFLAGS += --no-print-directory --no-builtin-rules

.PHONY: all tests test check check-long check-sanitize check-threads check-valgrind reproduce regimes setup format clean
all: $(BINARIES)
tests: all $(call programs,$(BUILD))

$(BUILD)/disagmoe: $(OBJECTS)
$(BUILD)/disagmoe-double: $(OBJECTS_DOUBLE)
$(call single,$(BUILD)): $(BUILD)/tests/%: $(BUILD)/tests/%.o $(filter-out $(MAIN:%.c=$(BUILD)/%.o),$(OBJECTS))
$(call double,$(BUILD)): $(BUILD)/double/tests/%: $(BUILD)/double/tests/%.o $(filter-out $(MAIN:%.c=$(BUILD)/double/%.o),$(OBJECTS_DOUBLE))
$(call programs,$(BUILD)): LDLIBS += -lcmocka
$(BINARIES) $(call programs,$(BUILD)):
	@mkdir -p $(@D)
	@echo "link $@"
	@$(CC) $(EXTRA) -o $@ $^ $(LDLIBS)

$(patsubst %.c,$(BUILD)/%.o,$(TRAIN)) $(patsubst %.c,$(BUILD)/double/%.o,$(TRAIN)): OPT = $(TRAIN_OPT)
$(BUILD)/double/%.o: CPPFLAGS += -DFLOATX_DOUBLE
$(BUILD)/double/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "compile $@"
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(EXTRA) -c -o $@ $<
$(BUILD)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "compile $@"
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(EXTRA) -c -o $@ $<
-include $(patsubst %.o,%.d,$(OBJECTS) $(OBJECTS_DOUBLE) $(addsuffix .o,$(call programs,$(BUILD))))

# Each check builds in a make of its own, started after set-up: what that installed is seen only then.
PLAIN_RUNS    = $(patsubst %,plain:%,$(call programs,build) $(SCRIPTS))
# Without test_tune here and under valgrind: an exhaustive search takes too long, and other tests tune there too.
SANITIZE_RUNS = $(patsubst %,sanitize:%,$(filter-out %test_tune,$(call programs,build/sanitize)) $(SCRIPTS))
# The slow ones, in one precision. The programs that have threads:
THREADS_RUNS  = $(patsubst %,threads:%,$(filter %test_base %test_layers %executor_mpi,$(call single,build/threads)))
VALGRIND_RUNS = $(patsubst %,valgrind:%,$(filter-out %_mpi %test_tune,$(call single,build/valgrind)))
test: tests
	@tests/run.sh $(PLAIN_RUNS)
check: setup
	@$(MAKE) tests
	@$(MAKE) tests $(SANITIZE)
	@$(MAKE) $(VALGRIND_RUNS:valgrind:%=%) $(VALGRIND)
	@$(MAKE) $(THREADS_RUNS:threads:%=%) $(THREADS)
	@tests/run.sh $(PLAIN_RUNS) $(SANITIZE_RUNS) $(THREADS_RUNS) $(VALGRIND_RUNS)
check-long:
	@DISAGMOE_LONG=1 $(MAKE) check
check-sanitize: setup
	@$(MAKE) tests $(SANITIZE)
	@tests/run.sh $(SANITIZE_RUNS)
check-threads: setup
	@$(MAKE) $(THREADS_RUNS:threads:%=%) $(THREADS)
	@tests/run.sh $(THREADS_RUNS)
check-valgrind: setup
	@$(MAKE) $(VALGRIND_RUNS:valgrind:%=%) $(VALGRIND)
	@tests/run.sh $(VALGRIND_RUNS)

reproduce: setup
	@$(MAKE) all
	@experiments/reproduce.sh
regimes: setup
	@$(MAKE) all
	@experiments/regimes.sh $(REGIMES)

setup:
	@tests/setup-packages.sh $(PACKAGES)
format:
	clang-format -i $(wildcard core/*/*.[ch] core/*/*/*.[ch] baselines/*.[ch] tests/*.[ch])
clean:
	rm -rf build
