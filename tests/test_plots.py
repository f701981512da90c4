import numpy as np

from raptor_hf.plots import plot_confusion, plot_fidelity, plot_similarity, save_figure


def test_similarity_frames_each_phase(tmp_path):
    figure = plot_similarity(np.eye(6), [3, 1, 2], "title")
    frames = [(p.get_x(), p.get_width()) for p in figure.axes[0].patches]
    assert frames == [(0.5, 3), (3.5, 1), (4.5, 2)]
    path = save_figure(figure, tmp_path / "new" / "similarity")
    assert path.suffix == ".png" and path.with_suffix(".svg").is_file()


def test_fidelity_draws_every_curve_and_shades_every_second_phase():
    curves = {"cosine": [1.0, 0.9, 0.8, 0.7], "r2": [1, 0.5, 0.4, 0.3]}
    figure = plot_fidelity({"before": {"cls": curves}, "after_stage2": {"cls": curves, "patch": curves}}, [1, 1, 1])
    left, right = figure.axes
    assert [len(axes.lines) for axes in (left, right)] == [1, 2]
    assert list(right.lines[0].get_ydata()) == curves["cosine"]
    assert len(left.patches) == 2
    assert right.get_title() == "after stage 2"


def test_class_names_are_text_and_no_formulas(tmp_path):
    names = ["$\\frac{$", "<b>$5$</b>", "x^2_$"]
    assert save_figure(plot_confusion([0, 1, 2], [0, 1, 2], names), tmp_path / "confusion").is_file()


def test_confusion_shows_the_share_of_each_class():
    figure = plot_confusion([0, 0, 1, 1], [0, 1, 1, 1], ["cat", "dog", "eel"])
    shares = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(shares, [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["cat", "dog", "eel"]
