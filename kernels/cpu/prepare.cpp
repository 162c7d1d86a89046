// What must happen once in a process before any other function of the library is called.

#include "kernels.h"
#include "tiles.h"

// Returns 0, or 1 where the system does not let this process use the instructions that the library was compiled for.
EXPORT int pagewire_prepare() {
#if defined(PAGEWIRE_TILES)
  return request_tiles() ? 0 : 1;
#else
  return 0;
#endif
}
