#!/bin/sh
# Builds the BPF objects from source. `build.sh --check` builds them elsewhere and compares. `cargo xtask bpf` runs
# this with the compiler that the committed ones are of.
set -eu
cd "$(dirname "$0")"
into=.
if [ "${1:-}" = --check ]; then
	into=$(mktemp -d)
	trap 'rm -rf "$into"' EXIT
fi
for arch in x86 arm64; do
	object=inspector.$arch.bpf.o
	# -mcpu=v3: atomics. Debug information carries the BTF; the DWARF is stripped again.
	"${CLANG:-clang}" -target bpf -mcpu=v3 -O2 -g -Wall -Werror -D__TARGET_ARCH_$arch \
		-fdebug-prefix-map="$PWD"=. -fno-ident \
		-c inspector.bpf.c -o "$into/$object"
	"${LLVM_STRIP:-llvm-strip}" -g "$into/$object"
	if [ "$into" != . ]; then
		cmp "$object" "$into/$object"
	fi
done
