
// Draws each chart of the page with uPlot, and reads its values out when keys move the cursor.
(() => {
  const curves = JSON.parse(document.getElementById("curves").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = value => value == null ? "–" : 
    value && Math.abs(value) < 1e-3 ? value.toExponential() .replace(/(\.\d{3})\d+/, "$1")
      : Number(value.toPrecision(5)).toString();
  const several = new Set(curves.flatMap(chart => chart.series.map(series => series.run))).size > 1;
  const figures = [...document.querySelectorAll("figure")];
  let plots = [];

  function seriesOf(chart) {
    const seen = {};
    return chart.series.map((series, number) => {
      const place = several ? series.run : number;
      const ofRun = seen[series.run] = (seen[series.run] ?? -1) + 1;
      const sparse = series.values.filter(value => value != null).length <= 60;
      return { label: series.label, stroke: colour(`--c${place % 6}`), width: 1.5, spanGaps: true,
               dash: several && ofRun ? [6, 3 * ofRun] : [], points: { show: sparse, size: 5 },
               value: (_, value) => short(value) };
    });
  }

  function draw(figure, chart) {
    const place = figure.querySelector(".plot"), output = figure.querySelector("output");
    place.replaceChildren();
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--grid"), width: 1 },
                   ticks: { stroke: colour("--grid"), width: 1 } };
    const plot = new uPlot({
      width: place.clientWidth, height: 220, scales: { x: { time: false } },
      series: [{ label: "step" }, ...seriesOf(chart)],
      axes: [axis, { ...axis, size: 64, values: (_, ticks) => ticks.map(short) }],
    }, [chart.steps, ...chart.series.map(series => series.values)], place);
    let at = chart.steps.length;
    place.onkeydown = event => {
      const last = chart.steps.length - 1;
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
      if (!(event.key in moves)) return;
      event.preventDefault();
      at = Math.max(0, Math.min(last, moves[event.key]));
      plot.setCursor({ left: plot.valToPos(chart.steps[at], "x"), top: 10 });
      const said = chart.series.filter(series => series.values[at] != null)
        .map(series => `${series.label} ${short(series.values[at])}`);
      output.textContent = `step ${chart.steps[at]}: ${said.join(", ")}`;
    };
    return plot;
  }

  const drawAll = () => {
    plots.forEach(plot => plot.destroy());
    plots = curves.map((chart, number) => draw(figures[number], chart));
  };
  drawAll();
  dark.addEventListener("change", drawAll);
  addEventListener("resize", () => plots.forEach((plot, number) =>
    plot.setSize({ width: figures[number].querySelector(".plot").clientWidth, height: 220 })));
})();
