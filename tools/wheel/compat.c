/* What objects compiled against this machine's glibc may refer to although glibc 2.28 lacks it.
 * Linked into the wheel, and only when a symbol is needed. Any other symbol that is too new makes
 * the link fail. See docs/internals/decisions/057-one-wheel.md. */

/* libstdc++ reads it (glibc 2.32) to leave out atomic operations. 0: other threads may run. */
char __libc_single_threaded = 0;
