// The kernels' WebAssembly module: on one thread, or on several that share its memory.

export const MOST_THREADS = 4;
const FIRST_PAGES = 64;
const MOST_PAGES = 2 ** 16;
const STACK_BYTES = 2 ** 18;
const SHARED = "\x06memory\x02\x03"; // how the module imports its memory

/**
 * Instantiate the module; return its exports and its memory. Where the page is isolated from others (served with COOP
 * and COEP), workers join as helping threads once they have started.
 */
export async function instantiate(module) {
  const shared = Boolean(globalThis.crossOriginIsolated);
  const memory = new WebAssembly.Memory({ initial: FIRST_PAGES, maximum: MOST_PAGES, shared });
  const compiled = await WebAssembly.compile(shared ? module : unshared(module));
  const { exports: kernels } = await WebAssembly.instantiate(compiled, { env: { memory } });
  const n_threads = shared ? Math.min(navigator.hardwareConcurrency, MOST_THREADS) : 1;
  const source = n_threads > 1 && URL.createObjectURL(new Blob([`(${help})()`], { type: "text/javascript" }));
  const room = (n) => kernels.gptworks_room(n) >>> 0;
  for (let i = 1; i < n_threads; i++) {
    const [stack, tls] = [room(STACK_BYTES) + STACK_BYTES, room(kernels.__tls_size.value)];
    new Worker(source).postMessage({ compiled, memory, stack, tls });
  }
  return { kernels, memory };
}

/** Return the module with an import of unshared memory: a page that is not isolated may not share its memory. */
function unshared(module) {
  const made = module.slice();
  made[new TextDecoder("latin1").decode(module.subarray(0, 4096)).indexOf(SHARED) + SHARED.length - 1] = 1;
  return made;
}

/** The whole code of a worker, which cannot use other names of this file. */
function help() {
  globalThis.onmessage = async ({ data: { compiled, memory, stack, tls } }) => {
    const { exports } = await WebAssembly.instantiate(compiled, { env: { memory } });
    exports.__stack_pointer.value = stack;
    exports.__wasm_init_tls(tls);
    try {
      exports.gptworks_help();
    } catch {
      exports.gptworks_lost();
    }
  };
}
