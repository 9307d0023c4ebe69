#!/bin/bash
# Writes src/sys/bindings.rs anew from the headers of OpenZFS (Debian: libzfslinux-dev), by bindgen 0.73:
#   cargo install bindgen-cli --version 0.73.2 && crab-backend-zfs/ffi/regenerate.sh [INCLUDE_DIR]
# Every function named here must be in the library, or it is refused when it is loaded. To call another one, add it.
set -euo pipefail
cd "$(dirname "$0")"
include=${1:-/usr/include}
functions=(
  libzfs_core_init
  lzc_create lzc_clone lzc_rename lzc_destroy lzc_destroy_snaps
  lzc_hold lzc_release
  lzc_exists
  lzc_channel_program lzc_channel_program_nosync
  lzc_send_resume lzc_receive_resumable
  nvlist_alloc nvlist_free nvlist_next_nvpair
  nvlist_add_boolean nvlist_add_boolean_value nvlist_add_int32 nvlist_add_int64 nvlist_add_uint64
  nvlist_add_string nvlist_add_nvlist
  nvpair_name nvpair_type nvpair_value_boolean_value nvpair_value_int32 nvpair_value_int64
  nvpair_value_uint64 nvpair_value_string nvpair_value_nvlist
)
list=$(IFS='|'; echo "${functions[*]}")
bindgen wrapper.h \
  --dynamic-loading LibZfsCore --dynamic-link-require-all \
  --allowlist-function "$list" --allowlist-type 'data_type_t|lzc_dataset_type|lzc_send_flags' \
  --opaque-type 'nvpair|nvlist' --default-enum-style consts --no-prepend-enum-name --no-layout-tests --no-doc-comments --merge-extern-blocks --wrap-unsafe-ops \
  --rust-edition 2024 --rust-target 1.85 \
  -- -I"$include/libzfs" -I"$include/libspl" -D_GNU_SOURCE >../src/sys/bindings.rs
