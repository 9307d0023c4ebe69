#include <libnvpair.h>
#include <libzfs_core.h>
