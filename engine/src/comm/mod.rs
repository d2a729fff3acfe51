//! Communicators: collectives over owned buffers, fingerprinted and bounded by deadlines.
