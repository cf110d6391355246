// Set light or dark as the page's data-theme before anything is painted: the only script that the page waits for.

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const chosen = localStorage.getItem("gptworks-theme");
    const system = dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = ["light", "dark"].includes(chosen) ? chosen : system;
  };
  show();
  dark.addEventListener("change", show);
  for (const name of ["gptworks-theme", "storage"]) addEventListener(name, show); // chosen here, or in another tab
})();
