// The operations for one level of instructions. Compiled once a level, each time with that level's flags; everything
// but the table lies in unnamed namespaces, so that no level can be linked against another's functions.

#include "encode.h"
#include "outer_step.h"

extern const Kernels KERNELS_OF_LEVEL;
const Kernels KERNELS_OF_LEVEL = {encode, decode_accumulate, outer_step, checksum};
