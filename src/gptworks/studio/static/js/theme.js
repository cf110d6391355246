// Set light or dark as the page's data-theme before anything is painted: the only script that the page waits for.

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("gptworks-theme");
    } catch {
      return null; // this page has no storage (store.js)
    }
  };
  const show = (event) => {
    const chosen = event?.detail ?? kept();
    const system = dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = ["light", "dark"].includes(chosen) ? chosen : system;
  };
  show();
  dark.addEventListener("change", show);
  for (const name of ["gptworks-theme", "storage"]) addEventListener(name, show); // chosen here, or in another tab
})();
